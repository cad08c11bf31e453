"""Background data loader: processes prepare minibatches ahead; results do not depend on them."""

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
from paceline.processes.child_process import ProcessSettings, check_may_have_children, fork, init_child
from paceline.processes.shared_pickle import SharedPickle
from paceline.processes.unpicklable import pickled
from paceline.utils.rng import derived_seed
from paceline.worker.data_loader import MinibatchLoader, fetch, share_of
from paceline.worker.minibatch_forecast import MinibatchForecast, UpcomingMinibatch
from paceline.worker.seeding import RandomStates, seeded


class _Request(NamedTuple):
    """Request for a batch: of these samples, or, for iterable data, of a worker's draw."""

    seed: int
    worker: int
    draw: int
    indices: NDArray[np.int64] | None


class _Prepared(NamedTuple):
    """Batch, with the states of the random generators after it was made if they changed."""

    batch: Batch
    states: RandomStates | None


class _Failed(NamedTuple):
    """Exception of the user's data set, with its traceback."""

    error: str
    details: str


class BackgroundLoader:
    """Loader of the same batches as `MinibatchLoader`, prepared ahead in processes of its own.

    A batch is made with the random numbers of its draw, in any process and at any time. The states of the generators
    after it are copied to this process. So results depend neither on the processes nor on the forecast.

    Args:
        job: job with the data, their sampling, loader_workers and prefetch.
        seed: seed of the run, >= 0.
        n: workers of the run, >= 1.
    """

    def __init__(self, job: Job, seed: int, n: int) -> None:
        self._job = job
        self._seed = seed
        self._n = n
        self._loader = MinibatchLoader(job, seed, n)
        shards = n if job.sharding == "partitioned" else 1
        per_epoch = job.minibatches_per_epoch(shards) if job.sampling == "epoch" else None
        self._forecast = MinibatchForecast(n if shards == 1 else 1, per_epoch)
        self._known: Iterable[UpcomingMinibatch] = ()
        self._capacity = job.loader_workers * job.prefetch
        self._ahead: dict[tuple[UpcomingMinibatch, int, int], Future[_Prepared | _Failed]] = {}
        self._spec: SharedPickle | None = None
        self._processes: dict[int, ProcessPoolExecutor] = {}  # of one process: each sequence has one reader
        self._started: dict[int, Future[None]] = {}
        self._submitted: dict[int, list[Future[_Prepared | _Failed]]] = {i: [] for i in range(job.loader_workers)}

    def prefetch(self, known: Iterable[UpcomingMinibatch]) -> None:
        """Set the minibatches that are known to follow the next one, in order."""
        self._known = known

    def batch(self, worker: int, draw: int, minibatch: Minibatch | None) -> Batch:
        """Return the batch of a worker's draw, as `MinibatchLoader.batch`."""
        return self._fetched(UpcomingMinibatch(worker, draw, minibatch), 0, 1)

    def share(self, worker: int, draw: int, minibatch: Minibatch | None, rank: int, size: int) -> Batch | None:
        """Return the share of one of several processes in that batch, as `MinibatchLoader.share`."""
        share = minibatch.share if minibatch is not None else 1.0
        if rank >= round(self._job.batch_size * share):
            return None
        return self._fetched(UpcomingMinibatch(worker, draw, minibatch), rank, size)

    def close(self) -> None:
        """End all background processes."""
        for future in self._ahead.values():
            future.cancel()
        for process in self._processes.values():
            process.shutdown(cancel_futures=True)
        self._ahead.clear()
        self._processes.clear()
        if self._spec is not None:
            self._spec.close()
            self._spec = None

    def _fetched(self, upcoming: UpcomingMinibatch, rank: int, size: int) -> Batch:
        future = self._ahead.pop((upcoming, rank, size), None) or self._submit(upcoming, rank, size)
        self._forecast.observe(upcoming)
        self._prepare_ahead(rank, size)
        try:
            answer = future.result()
        except BrokenProcessPool as error:
            raise self._process_error() from error
        if isinstance(answer, _Failed):
            raise RunError(
                f"job {self._job.name}: the data set failed for {upcoming}: {answer.error}\n{answer.details}"
            )
        if answer.states is not None:
            answer.states.restore()
        return answer.batch

    def _prepare_ahead(self, rank: int, size: int) -> None:
        """Submit the minibatches that are forecast next, and cancel those that no longer are."""
        forecast = self._forecast.next(2 * self._capacity, self._known)
        self._known = ()
        wanted = set(forecast)
        for key in list(self._ahead):
            # A cancelled draw that is requested after later ones would be read from the start of the data.
            is_in_order = self._job.is_iterable and not self._forecast.is_past(key[0])
            if key[0] not in wanted and not is_in_order:
                self._ahead.pop(key).cancel()
        limit = 2 * self._capacity + self._forecast.workers
        for upcoming in forecast[: self._capacity]:
            key = (upcoming, rank, size)
            if key not in self._ahead and len(self._ahead) < limit:
                self._ahead[key] = self._submit(upcoming, rank, size)

    def _submit(self, upcoming: UpcomingMinibatch, rank: int, size: int) -> Future[_Prepared | _Failed]:
        worker, draw, minibatch = upcoming
        seed, indices = derived_seed(self._seed, "gradient", worker, draw), None
        if not self._job.is_iterable:
            indices = self._loader.indices(worker, draw, minibatch)
            if size > 1:
                seed = derived_seed(self._seed, "gradient", worker, draw, rank)
                indices = share_of(indices, rank, size)
        request = _Request(seed=seed, worker=worker, draw=draw, indices=indices)
        number = self._process_for(worker)
        try:
            future = self._process(number).submit(_prepare, request)
        except BrokenProcessPool as error:
            raise self._process_error() from error
        self._submitted[number] = [each for each in self._submitted[number] if not each.done()] + [future]
        return future

    def _process_for(self, worker: int) -> int:
        """Return the number of the process that reads a worker's sequence, or of the one with the shortest queue."""
        if self._job.is_iterable:
            return worker % len(self._submitted)
        return min(self._submitted, key=lambda number: sum(not future.done() for future in self._submitted[number]))

    def _process(self, number: int) -> ProcessPoolExecutor:
        """Return the pool of a background process, started at the first call."""
        if number in self._processes:
            return self._processes[number]
        given = f"loader_workers={self._job.loader_workers} of job {self._job.name}"
        check_may_have_children(f"the processes of {given}", "loader_workers=0")
        if self._spec is None:
            self._spec = _pickled_spec(self._job, self._seed, self._n)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        initargs = (self._spec,)

        def start() -> tuple[ProcessPoolExecutor, Future[None]]:
            pool = ProcessPoolExecutor(1, mp_context=context, initializer=_init_process, initargs=initargs)
            return pool, pool.submit(_do_nothing)  # the first task starts the process

        process, self._started[number] = fork(start, "a background process that prepares minibatches")
        self._processes[number] = process
        return process

    def _process_error(self) -> RunError | UsageError:
        if all(begun.done() and begun.exception() is None for begun in self._started.values()):
            return RunError(
                f"job {self._job.name}: a background process that prepares minibatches ended (killed, out of memory, "
                "or out of shared memory in /dev/shm); give fewer loader_workers, a smaller prefetch, or "
                "loader_workers=0"
            )
        return UsageError(
            f"job {self._job.name}: a background process that prepares minibatches could not start (see above); each "
            "unpickles data and collate and imports their modules; correct the error, or give loader_workers=0"
        )


class _LoaderSpec(NamedTuple):
    """Arguments that all background processes share."""

    job: Job
    seed: int
    n: int
    threads: int
    settings: ProcessSettings


def _pickled_spec(job: Job, seed: int, n: int) -> SharedPickle:
    """Return the pickled arguments of the background processes: the job without model and optimizer."""
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
        _LoaderSpec(job=data_only, seed=seed, n=n, threads=torch.get_num_threads(), settings=ProcessSettings.capture()),
        {"data": job.data, "collate": job.collate},
        f"job {job.name}: data or collate cannot be sent to background processes",
        ", or give loader_workers=0",
    )


# --- in a background process ------------------------------------------------------------------------------

_job: Job
_loader: MinibatchLoader


def _init_process(spec: SharedPickle) -> None:
    global _job, _loader  # a pool's tasks can share state in no other way
    init_child()
    task: _LoaderSpec = spec.load()
    task.settings.apply()
    torch.set_num_threads(task.threads)  # the same number, so that sums are rounded alike
    _job = task.job
    _loader = MinibatchLoader(_job, task.seed, task.n)


def _do_nothing() -> None:
    """Start the process."""


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
