"""Vectorized timing simulation: arrays over workers instead of single events.

Updates and their times are bit-identical to those of the coordinator with `TimedWorkers`.
"""
