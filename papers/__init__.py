"""Published experiments, done again: one folder a paper."""
