"""The worker processes of the local engine as threads of this process, with the same messages and shared memory.

Threads share the random generators of torch, NumPy and Python. A test of a job that uses them needs processes.
"""

import os
import socket
import threading
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler

from machine_speed import scaled
from paceline.engines.local.worker_process import ChildProcess

LIMIT_S = scaled(20)
KILLED = -9


class Killed(BaseException):
    """The worker was killed."""


class Duplicate:
    """File descriptor that is passed on to a worker."""

    def __init__(self, file):
        self._file = file

    def detach(self):
        return self._file


class Duplicating:
    """Stand-in for the process that multiprocessing is starting: duplicates the file descriptors in its arguments."""

    duplicate_for_child = staticmethod(os.dup)
    DupFd = Duplicate


def passed_on(arguments):
    """Return arguments as another process receives them."""
    set_spawning_popen(Duplicating)
    try:
        pickled = ForkingPickler.dumps(arguments)
    finally:
        set_spawning_popen(None)
    return ForkingPickler.loads(pickled)


class WorkerThread(ChildProcess):
    """Thread in which a worker or the evaluation runs, with the methods of a process of multiprocessing.

    Args:
        target: `work` or `evaluate`.
        arguments: arguments as the worker receives them.

    Attributes:
        exitcode: exit status as that of a process; None while the thread runs.
    """

    def __init__(self, target, arguments):
        self._target = target
        self._arguments = arguments
        self._is_killed = threading.Event()
        self._closing = threading.Lock()
        self.fault_actions = {"die": self._die, "hang": self._hang}
        self.exitcode = None
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"worker {arguments.worker}")
        self._thread.start()

    def init(self):
        pass

    def apply(self, settings, threads):
        """Do nothing: the thread has the settings of its process."""

    def kill(self):
        """Close the pipe of the worker, and wait until the thread has ended."""
        self._is_killed.set()
        with self._closing, suppress(OSError), socket.socket(fileno=os.dup(self._arguments.connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
        self.join(LIMIT_S)
        assert not self.is_alive(), "a worker does not end"

    def join(self, timeout_s=None):
        self._thread.join(timeout_s)

    def is_alive(self):
        return self._thread.is_alive()

    def _run(self):
        code = 1
        try:
            self._target(self._arguments, self)
            code = 0
        except Killed:
            code = KILLED
        finally:
            self.exitcode = KILLED if self._is_killed.is_set() else code
            with self._closing:
                self._arguments.connection.close()
            self._arguments.memory.close()

    def _die(self):
        raise Killed

    def _hang(self):
        self._is_killed.wait()
        raise Killed


class ThreadLauncher:
    """Launcher of workers that are threads, one after another.

    A worker that starts seeds torch's random numbers, which belong to the whole process.
    """

    def __init__(self, preload):
        self._ours = None

    def pipe(self):
        self._ours, theirs = Pipe()
        return self._ours, theirs

    def start(self, target, arguments, *, has_children=False):
        thread = WorkerThread(target, passed_on(arguments))
        assert self._ours.poll(LIMIT_S), "a worker does not start"
        return thread
