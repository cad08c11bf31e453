"""Speeds of workers: medians, stragglers, and patterns of slowness."""
