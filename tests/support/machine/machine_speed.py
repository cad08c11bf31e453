"""Speed of this machine, which the waits of the tests scale with."""

import os
import time

STEPS, USUAL_S = 4_000_000, 0.06  # of a loop, and its time on an idle machine
VARIABLE = "SLOWNESS_OF_TESTS"  # so that every process has the measurement of the first one


def measured():
    """Return how many times its usual time a loop takes on this machine now, from 1 to 10."""
    began_s, left = time.perf_counter(), STEPS
    while left:
        left -= 1
    return min(10.0, max(1.0, (time.perf_counter() - began_s) / USUAL_S))


SLOWNESS = float(os.environ.setdefault(VARIABLE, str(measured())))


def scaled(seconds):
    """Return how long a test waits here for what takes at most so many seconds on an idle machine."""
    return seconds * SLOWNESS
