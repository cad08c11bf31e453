"""Recordings of plain DistributedDataParallel runs: file format, reader, analysis."""
