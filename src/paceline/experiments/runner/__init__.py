"""Execution of the runs of an experiment: grid, processes, folder, progress."""
