"""Data of a rank: the tasks and the batches that its loop takes, and what stays with the rank."""
