"""What happens in a run: counted, written down, read back."""
