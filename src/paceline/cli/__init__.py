"""The program `paceline`. Exit status: 0 success, 1 the run failed, 2 usage error, 130 interrupted."""

import sys


def main() -> None:
    """Run the program."""
    try:
        from paceline.cli.program import main as run_program  # late, so that Ctrl-C meanwhile shows no traceback
    except KeyboardInterrupt:
        sys.exit(130)
    run_program()
