"""Settings of all tests, and what a test may cost."""

import gc
import logging
import multiprocessing.forkserver
import multiprocessing.process
import os
import signal
import subprocess
import time

import pytest
from hypothesis import settings

from machine_speed import scaled

# A busy machine is no failure, and what was not changed fails today if it failed yesterday: `make explore` tries new
# examples.
settings.register_profile("paceline", deadline=None, derandomize=True, max_examples=20)
settings.register_profile("exploring", deadline=None, max_examples=300)
settings.load_profile("paceline")

# A shell that starts a command in the background lets it ignore SIGINT, which every process started by it inherits.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No test needs its files to survive a power failure: the disk would be most of the time of short runs.
os.fsync = os.fstat

# Each rank that makes an optimizer imports this, unless the process that forks it has done so.
set_forkserver_preload = multiprocessing.forkserver.set_forkserver_preload
multiprocessing.forkserver.set_forkserver_preload = lambda modules: set_forkserver_preload([*modules, "torch._dynamo"])

pytest.register_assert_rewrite("coordinator_harness")

WITH_PROCESSES = {"processes", "slow", "docs", "integrations"}  # markers of tests that may start processes of paceline
started = []  # names of the processes that the running test has started
start_process, start_command = multiprocessing.process.BaseProcess.start, subprocess.Popen.__init__


def recorded_process(process):
    started.append(process.name)
    start_process(process)


def recorded_command(popen, command, *arguments, **options):
    words = [command] if isinstance(command, str | bytes | os.PathLike) else command
    programs = [os.path.basename(os.fsdecode(word)) for word in words]
    started.extend(each for each in programs if each.startswith(("python", "paceline", "torchrun")))
    start_command(popen, command, *arguments, **options)


multiprocessing.process.BaseProcess.start = recorded_process
subprocess.Popen.__init__ = recorded_command

TIMEOUT_S = 120  # of a test without a marker `timeout`, if the command line has none
os.environ.setdefault("PYTEST_TIMEOUT", str(scaled(TIMEOUT_S)))

MOST_WITH_PROCESSES = 20
LONGEST = 5  # time of a test with real processes, by the clock of an idle machine, as a multiple of `processor_limit_s`
LONG = "long"  # property of a test that took longer than it may


def pytest_addoption(parser):
    parser.addini(
        "processor_limit_s", "seconds of processor time that a test may take which has no marker", default="3"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Exclude modules and tests, which live as long as this process, from garbage collection."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000)  # by default it would be a twentieth of the time
    return result


def configure_torch():
    """Configure torch for many test processes with many short tests."""
    import torch._dynamo  # not by the process that distributes the tests; else each first optimizer imports it

    torch.set_num_threads(1)  # the test processes already share the cores; more threads only wait for one another
    # Pytest attaches its handlers to each logger that does not propagate, six times a test: torch has forty of them.
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] == "torch":
            logging.getLogger(name).propagate = True


def pytest_collection_modifyitems(items):
    configure_torch()
    for item in items:
        timeout = item.get_closest_marker("timeout")
        if timeout is not None:
            item.add_marker(pytest.mark.timeout(scaled(*timeout.args)), append=False)
    marked = [item for item in items if item.get_closest_marker("processes") and not item.get_closest_marker("slow")]
    if len(marked) > MOST_WITH_PROCESSES:
        raise pytest.UsageError(f"{len(marked)} tests are marked processes, at most {MOST_WITH_PROCESSES} may be")


def processor_s():
    """Return the processor time of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def report_long(item, sentence):
    """Report that a test took too long: a failure in CI; elsewhere the machine may be slow or busy."""
    if os.environ.get("CI"):
        pytest.fail(f"{sentence}: make it cheaper or mark it slow")
    item.user_properties.append((LONG, sentence))


def pytest_terminal_summary(terminalreporter):
    reports = [each for each in terminalreporter.getreports("") if each.when == "call"]
    found = [f"{each.nodeid}: {value}" for each in reports for name, value in each.user_properties if name == LONG]
    if found:
        terminalreporter.section("tests that took long, a failure if CI is set")
        terminalreporter.write_line("\n".join(found))


@pytest.fixture(autouse=True)
def _worker_threads(request, monkeypatch):
    """Run the workers of a local cluster as threads, unless a marker of the test allows processes."""
    if not WITH_PROCESSES & {marker.name for marker in request.node.iter_markers()}:
        from worker_threads import ThreadLauncher  # not earlier: a measurement of coverage has begun by now

        monkeypatch.setattr("paceline.engines.local.workers.Launcher", ThreadLauncher)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    started.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    import torch

    markers = {marker.name for marker in item.iter_markers()}
    began_s, before_s, threads = time.monotonic(), processor_s(), torch.get_num_threads()
    result = yield
    taken_s, passed_s = processor_s() - before_s, time.monotonic() - began_s
    left = torch.get_num_threads()
    if left != threads:
        torch.set_num_threads(threads)  # with more, the tests after it would take ten times as long
        pytest.fail(f"it left torch with {left} threads instead of {threads}")
    if started and not markers & WITH_PROCESSES:
        pytest.fail(f"it started {', '.join(started)}: use threads of tests/support/, or mark it processes")
    limit_s = float(item.config.getini("processor_limit_s"))
    if not markers & WITH_PROCESSES and taken_s > limit_s:
        report_long(item, f"it took {taken_s:.1f} s of processor time, more than {limit_s:g} s")
    longest_s = scaled(LONGEST * limit_s)
    if "processes" in markers and "slow" not in markers and passed_s > longest_s:
        report_long(item, f"it took {passed_s:.1f} s, more than {longest_s:g} s")
    return result
