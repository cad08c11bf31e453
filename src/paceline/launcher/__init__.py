"""Launcher of ranks on one host: `paceline run`."""
