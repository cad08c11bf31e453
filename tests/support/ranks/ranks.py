"""The ranks of a job on this machine, each a process with torchrun's variables, as when they are started by hand."""

import ctypes
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch

import paceline as pl
from machine_speed import scaled
from paceline.core.records import DecisionMade, GradientArrived, WorkerLost
from paceline.engines.distributed import THIS_PROCESS

PRELOAD = ["paceline.engines.local.worker_process", "paceline.run.train"]
LIMIT_S = scaled(60)
TOKEN = "a secret of the tests that is hard to guess"


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def context():
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(PRELOAD)
    return made


class Job:
    """Starts ranks and collects their results.

    Args:
        world_size: ranks.
        job: what they train.
        settings: of `pl.train` and of `pl.Torchrun`, for every rank.
        nodes: hosts that the ranks believe to be on, as many on each.
    """

    def __init__(self, world_size, job, torchrun=None, nodes=1, **settings):
        self._world_size = world_size
        self._nodes = nodes
        self._job = job
        self._torchrun = {"start_timeout_s": scaled(30.0), **(torchrun or {})}
        self._settings = {"seed": 1, **settings}
        self._port = free_port()
        self._context = context()
        self._ends = {}
        self._folder = tempfile.TemporaryDirectory()
        self._started = []
        self.processes = {}  # the last one of each rank

    def start(self, rank, **changes):
        """Start a rank, or start it once more, perhaps with something else than the others."""
        environment = self._environment(rank, changes.pop("token", TOKEN), changes.pop("shard", None))
        name = environment.get("SHARD", rank)
        if name != rank and name in self.processes:
            name += " again"
        ours, theirs = self._context.Pipe(duplex=False)
        job = changes.pop("job", self._job)
        torchrun = {**self._torchrun, **changes.pop("torchrun", {})}
        prepare = changes.pop("prepare", None)  # is called in the process first
        callbacks = self._settings.get("callbacks", []) if rank == 0 else []
        callbacks = [Announce(self._place("training"), self._place("loss")), *callbacks]
        settings = {**self._settings, **changes, "callbacks": callbacks}
        arguments = (environment, job, torchrun, settings, self._place(f"said by {name}"), theirs, prepare)
        process = self._context.Process(target=_rank, args=arguments, daemon=not job.loader_workers)
        process.start()
        theirs.close()
        self._started.append(process)
        self.processes[name] = process
        self._ends[name] = ours
        return process

    def start_shards(self):
        """Start the servers of all shards but the first, each beside its rank, which does not start it here."""
        shards = self._torchrun.get("shards", 1)
        for number in range(1, shards):
            self.start(number * self._world_size // shards, shard=number)

    def _environment(self, rank, token=TOKEN, number=None):
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self._world_size),
            "LOCAL_WORLD_SIZE": str(self._world_size // self._nodes),
            "LOCAL_RANK": str(rank % (self._world_size // self._nodes)),
            "GROUP_RANK": str(rank // (self._world_size // self._nodes)),
            "GROUP_WORLD_SIZE": str(self._nodes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port),
            "PACELINE_TOKEN": token,
        }
        if number is None:
            return environment
        with patch.dict(os.environ, environment):
            workers = pl.Torchrun(**self._torchrun).n
        return {**environment, "PACELINE_SIDECAR": str(workers + number), "SHARD": f"shard {number}"}

    def start_workers(self):
        self.start_shards()
        for rank in range(1, self._world_size):
            self.start(rank)

    def serve(self):
        """Be rank 0 in this process, which has loaded everything already, and return its result."""
        with patch.dict(os.environ, self._environment(0)):
            result = pl.train(self._job, cluster=pl.Torchrun(**self._torchrun), **self._settings)
        return portable((result, result.history.records))

    def start_all(self):
        self.start_shards()
        self.start_all_but_shards()

    def start_all_but_shards(self):
        for rank in range(self._world_size):
            self.start(rank)

    def await_training(self):
        """Wait until some updates have been made."""
        self._await("training", "no update was made")

    def await_loss(self):
        """Wait until rank 0, in a process of its own, has declared a silent worker lost."""
        self._await("loss", "no worker was declared lost")

    def _await(self, what, otherwise):
        deadline_s = time.monotonic() + LIMIT_S
        while not self._place(what).exists():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{otherwise}; rank 0 said: {self.said(0)}")
            time.sleep(0.02)

    def said(self, rank):
        """Return what a rank has written to its standard error."""
        return self._place(f"said by {rank}").read_text()

    def _place(self, name):
        return Path(self._folder.name) / name

    def end(self, rank):
        """Return a rank's result, or raise what it raised; None if it ended without a word."""
        try:
            if not self._ends[rank].poll(LIMIT_S):
                raise TimeoutError(f"rank {rank} does not end")
            end = pickle.loads(self._ends[rank].recv_bytes())
        except EOFError:
            end = None
        self.processes[rank].join(LIMIT_S)
        if isinstance(end, BaseException):
            raise end
        return end

    def kill_all(self):
        for process in self._started:
            process.kill()
            process.join()
            process.close()
        for end in self._ends.values():
            end.close()
        self._folder.cleanup()


class Announce(pl.callbacks.Callback):
    """Makes a file when some updates have been made, and one when a worker was silent for too long."""

    def __init__(self, training, loss):
        self._training = training
        self._loss = loss

    def on_update(self, update):
        if update.version == 3:
            self._training.touch()

    def on_record(self, record):
        super().on_record(record)
        if isinstance(record, DecisionMade) and record.kind == "lost":
            self._loss.touch()


def _rank(environment, job, torchrun, settings, said, connection, prepare):
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), sys.stderr.fileno())
    os.environ.update(environment)
    torch.set_num_threads(1)  # as in the process of the tests
    if "NETWORK_NAMESPACE" in environment:
        enter(environment["NETWORK_NAMESPACE"])
    if prepare is not None:
        prepare()
    try:
        # The command of this process is that of multiprocessing, but the tests start the sidecars.
        with (
            patch(
                "paceline.run.spawned_sidecar.THIS_PROCESS", replace(THIS_PROCESS, start_sidecar=lambda _: NotHere())
            ),
            patch("paceline.run.spawned_sidecar.can_run_again", lambda: True),
        ):
            end = pl.train(job, cluster=pl.Torchrun(**torchrun), **settings)
        records = end.history.records
        told = (end, records)
    except SystemExit as left:
        told = left
    except BaseException as error:
        traceback.print_exc()
        told = error
    connection.send_bytes(pickle.dumps(portable(told)))
    connection.close()


class NotHere:
    """A process beside a rank, which these tests start themselves."""

    def kill(self):
        pass

    def stop(self, timeout_s=0.0):
        pass


def enter(namespace):
    """Take this process, which has one thread, into a network namespace, as `ip netns exec` does."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), 0x40000000) != 0:  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def portable(told):
    if isinstance(told, BaseException):
        return told
    result, records = told
    return Ended(
        result.model.state_dict(), records, result.stopped_by, result.reason, result.time_s, dict(result.metrics)
    )


class Ended:
    """What is told of a rank's result."""

    def __init__(self, parameters, records, stopped_by, reason, time_s, metrics):
        self.parameters = parameters
        self.records = records
        self.stopped_by = stopped_by
        self.reason = reason
        self.time_s = time_s
        self.metrics = metrics

    def of(self, kind):
        return [record for record in self.records if isinstance(record, kind)]


def launchers(job_class):
    """Return `ranks` and `run` for ranks that are processes, or threads, of this class."""

    @contextmanager
    def ranks(world_size, job, torchrun=None, **settings):
        """Yield the ranks of a job, none of them started; none of them is left afterwards."""
        made = job_class(world_size, job, torchrun, **settings)
        try:
            yield made
        finally:
            made.kill_all()

    def run(world_size, job, torchrun=None, **settings):
        """Return the results of every rank, of which the first one is the caller."""
        with ranks(world_size, job, torchrun, **settings) as made:
            made.start_workers()
            return [made.serve(), *(made.end(rank) for rank in range(1, world_size))]

    return ranks, run


ranks, run = launchers(Job)


def flat(parameters):
    return torch.cat([tensor.reshape(-1).double() for tensor in parameters.values()])


def used_by(end, worker):
    return sum(record.used and record.worker == worker for record in end.of(GradientArrived))


def lost(end):
    return [(record.worker, record.reason) for record in end.of(WorkerLost)]
