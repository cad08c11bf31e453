"""Probe: read-only timing of DistributedDataParallel steps inside the ranks of any script."""
