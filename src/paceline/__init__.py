"""Straggler-proof data-parallel training for PyTorch."""
