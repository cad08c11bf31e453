"""Distribution of the tests to processes that are forked when the tests have been collected.

So the modules of the tests, torch and all others are imported once, not once in each process.
"""

import os
import signal
from collections import deque
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import wait

import pytest


def pytest_addoption(parser):
    parser.getgroup("distribution")._addoption(
        "-n", dest="processes", metavar="COUNT", type=int, default=0, help="processes for the tests; 0: this one"
    )


def pytest_runtestloop(session):
    """Run the tests in other processes, unless there shall be none, or there is nothing to run."""
    option = session.config.option
    if not option.processes or option.collectonly or option.usepdb or session.testsfailed or not session.items:
        return None
    session.config._tmp_path_factory.getbasetemp()  # the processes have their folders in it
    distribution = Distribution(session)
    for number in range(min(option.processes, len(session.items))):
        connection = distribution.fork()
        if connection is not None:
            run_tests(session, number, connection)
            return True
    distribution.finish()
    return True


class Shares:
    """The tests that are left: those of each process, and the files that no process has begun.

    Args:
        files: indices of tests, by file.
        is_divisible: whether a process may take a part of the file of a test from another one.
    """

    def __init__(self, files, is_divisible):
        self._files = deque(map(deque, files))
        self._is_divisible = is_divisible
        self._of_process = {}

    def next(self, process):
        """Return the index of the next test for a process, None if there is none.

        It gets a file, then the next one, and at the end half of what another has left.
        """
        own = self._of_process.setdefault(process, deque())
        if not own and self._files:
            own.extend(self._files.popleft())
        if not own:
            divisible = [each for each in self._of_process.values() if len(each) > 1 and self._is_divisible(each[0])]
            longest = max(divisible, key=len, default=())
            own.extendleft(longest.pop() for _ in range(len(longest) // 2))
        return own.popleft() if own else None


class Distribution:
    """Hands tests to processes, and shows what they report.

    Attributes:
        running: index of the test that a process runs, by connection.
    """

    def __init__(self, session):
        self._session = session
        files = groupby(range(len(session.items)), key=lambda index: session.items[index].path)
        self._shares = Shares((indices for _, indices in files), self._is_function)
        self._pids, self.running = {}, {}

    def _is_function(self, index):
        return isinstance(self._session.items[index], pytest.Function)  # the blocks of a page depend on each other

    def fork(self):
        """Return the connection in the new process, None in this one."""
        ours, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            ours.close()
            return theirs
        theirs.close()
        self._pids[ours], self.running[ours] = pid, None
        return None

    def finish(self):
        """Return when every test has been run, or raise as a session in one process does."""
        try:
            while self.running:
                for connection in wait(list(self.running)):
                    self._receive(connection)
        finally:
            for connection, pid in self._pids.items():
                if connection in self.running:
                    os.kill(pid, signal.SIGTERM)
                os.waitpid(pid, 0)

    def _receive(self, connection):
        hook, config = self._session.config.hook, self._session.config
        try:
            kind, value = connection.recv()
        except EOFError:
            index = self.running[connection]
            place = "before its first test" if index is None else f"during {self._session.items[index].nodeid}"
            pytest.exit(f"a process ended {place}", returncode=3)
        if kind == "next":
            connection.send(self._shares.next(connection))
        elif kind == "start":
            self.running[connection] = value
        elif kind == "report":
            report = hook.pytest_report_from_serializable(config=config, data=value)
            hook.pytest_runtest_logreport(report=report)
            if self._session.shouldfail:
                raise self._session.Failed(self._session.shouldfail)
        else:
            del self.running[connection]


class Reports:
    """Plugin that sends reports to the process that shows them."""

    def __init__(self, config, connection):
        self._config = config
        self._connection = connection

    def pytest_runtest_logreport(self, report):
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))


def run_tests(session, number, connection):
    """Run the tests that a process gets."""
    config = session.config
    separate(config, number)
    config.pluginmanager.register(Reports(config, connection))

    def ask():
        connection.send(("next", None))
        return connection.recv()

    index = ask()
    while index is not None:
        following = ask()
        connection.send(("start", index))
        nextitem = None if following is None else session.items[following]
        config.hook.pytest_runtest_protocol(item=session.items[index], nextitem=nextitem)
        index = following
    connection.send(("end", None))


def separate(config, number):
    """Give a new process its own files for output and temporary folders, and nothing for the terminal."""
    config.workerinput = {"workerid": str(number)}  # plugins that write files leave it to the process without this
    config.get_terminal_writer()._file = open(os.devnull, "w")  # noqa: SIM115  # as long as this process
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    factory = config._tmp_path_factory
    factory._basetemp = factory.getbasetemp() / f"process-{number}"
    factory._basetemp.mkdir(mode=0o700)
