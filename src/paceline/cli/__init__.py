"""The program `paceline`. Exit status: 0 done, 1 the run failed, 2 it cannot work as asked, 130 interrupted."""

from paceline.cli.main import main

__all__ = ["main"]
