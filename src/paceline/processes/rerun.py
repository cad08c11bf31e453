"""Whether the command of this process can be run again, to have a second process at the same place of the program."""

from __future__ import annotations

import multiprocessing
import os
import sys


def can_run_again() -> bool:
    """Return whether the command of this process leads a second process to the same call.

    It does for a script and for ``python -m module``. It does not in a notebook or at a prompt, where statements were
    typed; with ``python -c`` and a program on standard input, which may have been read already; in a test of pytest,
    which is one of many; and in a process that multiprocessing has started, whose command is that of multiprocessing or
    of the parent.
    """
    if multiprocessing.parent_process() is not None or _is_in_a_test():
        return False
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is not None:  # python -m
        return True
    script = getattr(main, "__file__", None)
    return script is not None and os.path.realpath(script) in map(os.path.realpath, sys.orig_argv[1:])


def _is_in_a_test() -> bool:
    """Return whether this process runs a test of pytest; a process that a test starts inherits the variable only."""
    return "PYTEST_CURRENT_TEST" in os.environ and "_pytest.runner" in sys.modules
