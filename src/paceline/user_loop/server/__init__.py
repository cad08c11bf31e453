"""Server beside rank 0: its process, and what rank 0 sends to it."""
