"""Tasks of worker processes: the one under way, and the one that follows when it has been cancelled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container

from paceline.core.events import Compute, Interrupt
from paceline.engines.ports import Parameters


class TaskParameters(ABC):
    """Versions that tasks read, and the gradients that they leave."""

    @abstractmethod
    def acquire(self, version: int) -> object:
        """Note that a task reads a version."""

    @abstractmethod
    def release(self, version: int) -> None:
        """Note that a task no longer reads a version."""

    @abstractmethod
    def received(self, worker: int, draw: int, missing: Container[int], version: int | None) -> None:
        """Note a complete gradient, or its notice.

        Args:
            worker: number of the worker.
            draw: number of its task.
            missing: parameters that have none.
            version: version at which it was computed, which is kept until the coordinator has handled the arrival; None
                for a gradient that will not be used.
        """


class ProcessParameters(Parameters, TaskParameters):
    """Parameters of a run whose workers are processes."""


class WorkerTasks:
    """Tasks of one worker process.

    Attributes:
        is_ready: whether the worker can be given a task.
        working: task that the worker has neither completed nor cancelled; None if it is idle.
        waiting: task that it will be given after the cancelled one.
    """

    def __init__(self) -> None:
        self.is_ready = False
        self.working: Compute | None = None
        self.waiting: Compute | None = None


class TaskBoard:
    """Tasks of all workers, and the versions that they read.

    Args:
        parameters: versions and gradients.
        send: function that sends a task to its worker.
    """

    def __init__(self, parameters: TaskParameters, send: Callable[[Compute], None]) -> None:
        self._parameters = parameters
        self._send = send
        self._tasks: dict[int, WorkerTasks] = {}

    def __getitem__(self, worker: int) -> WorkerTasks:
        return self._tasks.setdefault(worker, WorkerTasks())

    @property
    def busy(self) -> int:
        """Number of workers that compute."""
        return sum(tasks.working is not None for tasks in self._tasks.values())

    def assign(self, command: Compute) -> None:
        """Give a worker a task, or let the task wait until the worker has cancelled the one before."""
        tasks = self[command.worker]
        if not tasks.is_ready:
            return  # its loss is an event that the coordinator has not handled yet
        self._parameters.acquire(command.version)
        if tasks.working is None:
            self._begin(tasks, command)
        else:
            tasks.waiting = command  # only the newest: a worker that cancels slowly must not keep many versions

    def cancels(self, command: Interrupt) -> bool:
        """Cancel the task that waits for a worker; return whether it has none, so that the worker has to cancel."""
        tasks = self[command.worker]
        if not tasks.is_ready:
            return False
        if tasks.waiting is None:
            return True
        self._parameters.release(tasks.waiting.version)
        tasks.waiting = None
        return False

    def on_gradient(self, worker: int, missing: Container[int]) -> None:
        """Note a gradient, or its notice, and give its worker the waiting task."""
        tasks = self[worker]
        assert tasks.working is not None
        # A gradient that has crossed its interrupt will not be used.
        version = tasks.working.version if tasks.waiting is None else None
        self._parameters.received(worker, tasks.working.draw, missing, version)
        self.on_idle(worker)

    def on_idle(self, worker: int) -> None:
        """Release the version that a worker no longer reads, and give it the waiting task."""
        tasks = self[worker]
        assert tasks.working is not None
        self._parameters.release(tasks.working.version)
        tasks.working = None
        waiting, tasks.waiting = tasks.waiting, None
        if waiting is not None:
            self._begin(tasks, waiting)

    def on_lost(self, worker: int) -> None:
        """Release the versions that a lost worker has read."""
        tasks = self._tasks.pop(worker, WorkerTasks())
        for command in (tasks.working, tasks.waiting):
            if command is not None:
                self._parameters.release(command.version)

    def _begin(self, tasks: WorkerTasks, command: Compute) -> None:
        tasks.working = command
        self._send(command)
