"""Records of a run: counting, writing and reading them."""
