"""The program `paceline`. Exit status: 0 success, 1 the run failed, 2 usage error, 130 interrupted."""

from paceline.cli.main import main

__all__ = ["main"]
