"""Failing parts of jobs, in a module that other processes import quickly."""

import os
import signal

from paceline.policies.controllers.base import Controller


class BrokenController(Controller):
    def begin(self, n):
        return None

    def decide(self, state, observation):
        raise ValueError("my mistake")


def kill_this_process(output, target):
    os.kill(os.getpid(), signal.SIGKILL)
