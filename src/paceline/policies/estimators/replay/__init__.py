"""Replay of protocols over recorded round trips."""
