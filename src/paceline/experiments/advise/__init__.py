"""Advice: predicted times of protocols from a recorded run."""
