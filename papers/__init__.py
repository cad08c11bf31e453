"""Reproductions of published experiments, one folder per paper."""
