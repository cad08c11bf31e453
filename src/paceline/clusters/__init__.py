"""Clusters: simulated, local and torchrun clusters, their launch settings, faults and parser."""
