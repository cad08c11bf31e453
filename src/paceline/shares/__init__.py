"""Balance: unequal shares of the global batch under torch's own reducers, in scripts that stay as they are."""
