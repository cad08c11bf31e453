"""Dutta et al., "Slow and Stale Gradients Can Win the Race", AISTATS 2018."""
