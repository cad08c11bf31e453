"""Minibatches prepared ahead in background processes; they change the time of a run and nothing else."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from paceline.core.events import Minibatch
from paceline.errors import RunError, UsageError
from paceline.jobs.job import Batch, Job
from paceline.processes.child_process import ProcessSettings, init_child, without_main_module
from paceline.processes.shared_pickle import SharedPickle
from paceline.processes.unpicklable import pickled
from paceline.utils.rng import derived_seed
from paceline.worker.data_loader import MinibatchLoader, fetch, share_of
from paceline.worker.minibatch_forecast import MinibatchForecast, UpcomingMinibatch
from paceline.worker.seeding import RandomStates, seeded


class _Request(NamedTuple):
    """A batch to prepare: of these samples, or of a worker's draw where the data can only be read in sequence."""

    seed: int
    worker: int
    draw: int
    indices: NDArray[np.int64] | None


class _Prepared(NamedTuple):
    """A batch, and the states of the random generators after it was made, if they changed."""

    batch: Batch
    states: RandomStates | None


class _Failed(NamedTuple):
    """An exception of the user's data set, with its traceback."""

    error: str
    details: str


class BackgroundLoader:
    """Makes batches as `MinibatchLoader` does, ahead of time, in processes of its own.

    A batch is made with the random numbers of its draw, wherever and whenever it is made, and the generators are left
    here as they are there. So the numbers of a run do not depend on the processes or on what was forecast.

    Args:
        job: data, how to sample them, loader_workers and prefetch.
        seed: of the run.
        n: workers of the run.
    """

    def __init__(self, job: Job, seed: int, n: int) -> None:
        self._job = job
        self._seed = seed
        self._n = n
        self._loader = MinibatchLoader(job, seed, n)
        shards = n if job.sharding == "partitioned" else 1
        per_epoch = job.minibatches_per_epoch(shards) if job.sampling == "epoch" else None
        self._forecast = MinibatchForecast(n if shards == 1 else 1, per_epoch)
        self._coming: Iterable[UpcomingMinibatch] = ()
        self._capacity = job.loader_workers * job.prefetch
        self._ahead: dict[tuple[UpcomingMinibatch, int, int], Future[_Prepared | _Failed]] = {}
        self._parcel: SharedPickle | None = None
        self._processes: dict[int, ProcessPoolExecutor] = {}  # one each, so that each sequence is read by one of them
        self._begun: dict[int, Future[None]] = {}
        self._given: dict[int, list[Future[_Prepared | _Failed]]] = {i: [] for i in range(job.loader_workers)}

    def expect(self, coming: Iterable[UpcomingMinibatch]) -> None:
        """Note which work is known to come next, in order, after the one that is asked for next."""
        self._coming = coming

    def batch(self, worker: int, draw: int, minibatch: Minibatch | None) -> Batch:
        """Return the batch of this worker's draw, as `MinibatchLoader.batch`."""
        return self._fetched(UpcomingMinibatch(worker, draw, minibatch), 0, 1)

    def share(self, worker: int, draw: int, minibatch: Minibatch | None, place: int, size: int) -> Batch | None:
        """Return what one of several processes takes of that batch, as `MinibatchLoader.share`."""
        if place >= self._job.batch_size:
            return None
        return self._fetched(UpcomingMinibatch(worker, draw, minibatch), place, size)

    def close(self) -> None:
        """End the processes; none is left behind."""
        for future in self._ahead.values():
            future.cancel()
        for process in self._processes.values():
            process.shutdown(cancel_futures=True)
        self._ahead.clear()
        self._processes.clear()
        if self._parcel is not None:
            self._parcel.close()
            self._parcel = None

    def _fetched(self, piece: UpcomingMinibatch, place: int, size: int) -> Batch:
        future = self._ahead.pop((piece, place, size), None) or self._submit(piece, place, size)
        self._forecast.served(piece)
        self._prepare_ahead(place, size)
        try:
            answer = future.result()
        except BrokenProcessPool as error:
            raise self._ended() from error
        if isinstance(answer, _Failed):
            raise RunError(f"job {self._job.name}: {_told(piece)} failed: {answer.error}\n{answer.details}")
        if answer.states is not None:
            answer.states.restore()
        return answer.batch

    def _prepare_ahead(self, place: int, size: int) -> None:
        """Begin what is forecast to be asked for next, and forget what is no longer."""
        forecast = self._forecast.next(2 * self._capacity, self._coming)
        self._coming = ()
        wanted = set(forecast)
        for key in list(self._ahead):
            is_in_order = self._job.is_iterable and not self._forecast.is_past(key[0])
            if key[0] not in wanted and not is_in_order:
                self._ahead.pop(key).cancel()
        limit = 2 * self._capacity + self._forecast.workers
        for piece in forecast[: self._capacity]:
            key = (piece, place, size)
            if key not in self._ahead and len(self._ahead) < limit:
                self._ahead[key] = self._submit(piece, place, size)

    def _submit(self, piece: UpcomingMinibatch, place: int, size: int) -> Future[_Prepared | _Failed]:
        worker, draw, minibatch = piece
        indices, keys = None, [worker, draw]
        if not self._job.is_iterable:
            indices = self._loader.indices(worker, draw, minibatch)
            if size > 1:
                indices, keys = share_of(indices, place, size), [worker, draw, place]
        request = _Request(derived_seed(self._seed, "gradient", *keys), worker, draw, indices)
        number = self._process_for(worker)
        try:
            future = self._process(number).submit(_prepare, request)
        except BrokenProcessPool as error:
            raise self._ended() from error
        self._given[number] = [given for given in self._given[number] if not given.done()] + [future]
        return future

    def _process_for(self, worker: int) -> int:
        """Return the process that reads a worker's sequence, or the one with the least to do."""
        if self._job.is_iterable:
            return worker % len(self._given)
        return min(self._given, key=lambda number: sum(not future.done() for future in self._given[number]))

    def _process(self, number: int) -> ProcessPoolExecutor:
        """Return a background process, started if it is not running yet."""
        if number in self._processes:
            return self._processes[number]
        if multiprocessing.current_process().daemon:
            raise UsageError(
                f"job {self._job.name}: loader_workers = {self._job.loader_workers} in a daemon process of "
                "multiprocessing, which may have no children; start it with daemon=False, or give loader_workers=0"
            )
        if self._parcel is None:
            self._parcel = _packed(self._job, self._seed, self._n)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        process = ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=(self._parcel,))
        self._processes[number] = process
        with without_main_module():  # the first task starts the process
            self._begun[number] = process.submit(_nothing)
        return process

    def _ended(self) -> RunError | UsageError:
        if all(begun.done() and begun.exception() is None for begun in self._begun.values()):
            return RunError(
                f"job {self._job.name}: a background process that prepares minibatches ended (killed, out of memory, "
                "or out of shared memory in /dev/shm); give fewer loader_workers, a smaller prefetch, or "
                "loader_workers=0"
            )
        return UsageError(
            f"job {self._job.name}: a background process that prepares minibatches could not start (see above); each "
            "unpickles data and collate and imports their modules; correct that, or give loader_workers=0"
        )


class _Task(NamedTuple):
    """What all background processes have in common."""

    job: Job
    seed: int
    n: int
    threads: int
    surroundings: ProcessSettings


def _packed(job: Job, seed: int, n: int) -> SharedPickle:
    """Return what a process needs to make batches, without the model."""
    data_only = replace(
        job,
        model=nn.Identity,
        optimizer=torch.optim.SGD,
        loss=nn.functional.mse_loss,
        step=None,
        eval_data=None,
        scheduler=None,
        schedule=None,
        no_decay_on=(),
        sampler=None,
        sampling="replacement",
        sharding="shared",
    )
    return pickled(
        _Task(data_only, seed, n, torch.get_num_threads(), ProcessSettings.capture()),
        {"data": job.data, "collate": job.collate},
        f"job {job.name}: data or collate cannot be sent to background processes",
        ", or give loader_workers=0",
    )


def _told(piece: UpcomingMinibatch) -> str:
    what = f"the data set, asked for the minibatch of worker {piece.worker}'s draw {piece.draw}"
    if piece.minibatch is None or piece.minibatch.number is None:
        return what
    return f"{what} (minibatch {piece.minibatch.number} of epoch {piece.minibatch.epoch})"


# --- in a background process ------------------------------------------------------------------------------

_job: Job
_loader: MinibatchLoader


def _begin(parcel: SharedPickle) -> None:
    global _job, _loader  # a task of a pool can be given state in no other way
    init_child()
    task: _Task = parcel.open()
    task.surroundings.apply()
    torch.set_num_threads(task.threads)  # as many, so that sums are rounded alike
    _job = task.job
    _loader = MinibatchLoader(_job, task.seed, task.n)


def _nothing() -> None:
    """Let the process start."""


def _prepare(request: _Request) -> _Prepared | _Failed:
    try:
        with seeded(request.seed):
            before = RandomStates()
            if request.indices is None:
                batch: Any = _loader.batch(request.worker, request.draw, None)
            else:
                batch = fetch(_job, request.indices)
            after = RandomStates()
    except Exception as error:
        return _Failed(f"{type(error).__name__}: {error}", traceback.format_exc())
    return _Prepared(batch, None if before == after else after)
