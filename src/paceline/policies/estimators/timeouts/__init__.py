"""Losses of workers, and the silence after which one counts as lost."""
