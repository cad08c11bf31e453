"""Threads, files and unreadable memory of the test's own process."""

import gc
import os
import tempfile
import threading
import time

import psutil
import torch

from machine_speed import scaled


def what_is_open():
    """Return threads, listening ports and the number of open files of this process."""
    gc.collect()
    process = psutil.Process()
    ports = [each.laddr.port for each in process.connections(kind="tcp") if each.status == psutil.CONN_LISTEN]
    return sorted(thread.name for thread in threading.enumerate()), ports, process.num_fds()


def wait_until(is_so):
    deadline_s = time.monotonic() + scaled(60)
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def in_thread(call):
    """Call a function in a thread; return the thread and the list of exceptions that it raises."""
    raised = []

    def run():
        try:
            call()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, raised


def torn(size):
    """Return ones of which the kernel can read half: a process that sends them ends in the middle."""
    with tempfile.NamedTemporaryFile() as file:
        whole = torch.from_file(file.name, shared=True, size=size).fill_(1.0)
        os.truncate(file.name, whole.nbytes // 2)
    return whole
