"""Experiments over many runs: comparisons, learning-rate range tests, switch-point searches, advice."""
