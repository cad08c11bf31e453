"""Xu, Neglia, Sebastianelli, "Dynamic Backup Workers for Parallel Machine Learning", 2020."""
