"""Cluster of processes started by `paceline run` or torchrun, or by a shell with the same variables."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import KW_ONLY, field, replace
from numbers import Integral
from pathlib import Path

from paceline.clusters.devices import check_device, cores
from paceline.clusters.faults import Fault, check_faults
from paceline.clusters.launch_env import LaunchEnv
from paceline.clusters.rank_checks import (
    check_address,
    check_groups,
    check_least_workers,
    check_most_workers,
    check_no_standby,
    check_rank,
    check_standby,
    check_without_server,
)
from paceline.clusters.simulated import Cluster, check_no_censored_sleep
from paceline.clusters.spot_notice import parse_notice
from paceline.clusters.tls_files import TLS_FILES, check_tls_files
from paceline.core.wire import parse_wire
from paceline.errors import UsageError
from paceline.protocols.protocol import Plan
from paceline.utils.checked_dataclass import checked_dataclass
from paceline.utils.spec_parser import short_repr
from paceline.utils.validation import check_optional_range, check_range
from paceline.utils.wording import counted

WORKERS = ("process", "node")
NO_SERVER = ", without a server"  # of the text of a cluster
MOST_HEARTBEAT_TIMEOUT_S = 86_400  # a day; the operating system refuses its timers for more than some days
NOT_OF_THE_RUN = (
    "address",
    "server",
    "group_size",
    "groups",
    "group",
    "min_workers",
    "start_timeout_s",
    "heartbeat_timeout_s",
    "notice",
    "bytes_per_s",
    "shards",
    "standby",
    "standby_sync",
    "standby_address",
    "debug",
    "share_memory",
    "encrypt",
    *TLS_FILES,
)


def _launch_env() -> LaunchEnv:
    return LaunchEnv.from_environment(os.environ)


# Long: one argument for each way in which ranks are started and reach each other.
@checked_dataclass(frozen=True)
class Torchrun:
    """Cluster of processes that a launcher has started: rank 0 hosts the coordinator and the server.

    The launcher is ``paceline run``, or torchrun. It sets the number of processes. Every rank calls `pl.train` with the
    same arguments. With one process, rank 0 is server and worker.

    With ``workers="node"`` the processes of a host form one worker. Each computes its share of the samples of every
    minibatch. The shares are summed within the host (gloo, or NCCL if each process has its own GPU), and the first
    process communicates with the server. On the host of rank 0, the worker consists of the other processes, and of the
    worker at the server if there is one. If rank 0 is alone on its host, that host is not a worker.

    Args:
        address: address of the host of rank 0, on which the server listens, for example ``"10.0.0.1"`` or
            ``"10.0.0.1:29511"``. The default is reachable from this machine only.
        server: whether gradients go to a server at rank 0, which sends back the parameters. Without one they stay where
            they are: the ranks sum those that count (gloo, or NCCL where each rank has a GPU of its own), and each
            steps its own optimizer, so the traffic is that of DistributedDataParallel and every rank is a worker. Rank
            0 starts its worker as a second process. For protocols of fresh gradients (bsp, balanced, k_sync, dbw and
            their kin), and for k_async and k_batch_async with one more copy of the parameters at each rank. None for a
            server, but not in an attached loop whose gradients are fresh and whose options need none.
        worker_at_server: whether a second process on the host of rank 0, started by rank 0, is a worker. Not for
            protocols without a server (all_reduce, local_sgd, s3gd, dc_s3gd), where every rank is a worker.
        workers: unit of a worker, "process", or "node" for all processes of a host.
        group_size: ranks that hold one replica of the model together, a shard each, as one worker, >= 1; `attach` sets
            it for a model that is sharded by ``fully_shard``.
        groups: number of launchers that each start the ranks of one worker, as a world of their own, >= 1. They have
            the same token, and an ``address`` with a port.
        group: number of this one, from 0; its rank 0 is that of the run.
        device: device of the workers, ``"cpu"`` or ``"cuda"`` (not tested on GPUs yet).
        slowness: simulated cluster whose compute times the workers sleep, as in `LocalCluster`; None for none.
        threads: number of threads of each worker, >= 1; None for an equal share of the cores of its host.
        wire: format of float32 parameters and gradients on the network. Server and workers compute in float32; buffers
            and other types are sent unchanged. "bf16" (8 bits, the range of float32) and "float16" (11 bits) need half
            the bytes and round to nearest; what overflows float16 is not finite, and dropped. "int8", "int4" and
            "top_k(share=0.01)" need a quarter, an eighth and 1/66 of the bytes, in both directions. What a message of
            theirs leaves out is added to the next one. Parts of a gradient are sent before the backward pass has ended,
            except with these three, with ``workers="node"`` and on CUDA. Protocols without a server take "float32" or
            one of these three, on the CPU: each rank then sends its message to all others, in place of a sum.
        shards: number of parameter servers, each with one shard of the parameters, from 1 to the number of processes.
            The first one is at rank 0, the others at rank j * processes // shards. The resulting parameters are the
            same up to rounding.
        standby: number of standby processes, 0 or 1. One beside the last rank follows every update, and takes the place
            of rank 0 if that is lost. Not under torchrun itself, which ends all ranks when one fails.
        standby_sync: whether an update is recorded, and passed to callbacks, only when the standby has what it needs
            for it, so that none of these is lost; else the standby may lack the newest one. Needs a server.
        standby_address: host and port of the standby, as ``"10.0.0.2:29501"``, for every process. Processes that start
            after the loss of rank 0 find it there; without it only those that were there do.
        bytes_per_s: bandwidth of rank 0 in each direction, in bytes per second, > 0; None to measure it for its load.
        faults: scripted faults, to test how a run handles them.
        min_workers: number of workers, >= 1, that is enough when start_timeout_s has passed and others are missing;
            None for all that were started. Workers that come later join.
        max_workers: largest number of workers, >= 1, the same for every process. Processes with ranks beyond those that
            were started may join up to this number, whatever their WORLD_SIZE. None for no more than were started.
            Rank 0 holds memory for so many gradients.
        start_timeout_s: seconds within which the processes that were started must join, > 0.
        heartbeat_timeout_s: seconds without any byte from a process, which also answers heartbeats, after which it
            counts as lost, from 1 to 86400.
        notice: source of the notice that this machine will be taken away, which counts as SIGTERM: "aws", "gcp" or
            "azure" for the service of the cloud, or a path with a slash, as ``"/run/preempt"``, of a file that then is.
        share_memory: whether workers on the host of the server map its memory (Linux), so that versions and gradients
            are not sent. Not with workers="node", debug, another wire than "float32", or a shard on another host.
        encrypt: whether connections use TLS 1.3. Without it both sides still prove that they have the token, but every
            process on the network path can read and change parameters and gradients.
        tls_cert: PEM file with a certificate of this host, by which TLS proves who it is; None for the token.
        tls_key: PEM file with the private key of that certificate, without a passphrase.
        tls_ca: PEM file with the certificate authority whose certificates are accepted.
        debug: whether the run ends when user code changes the parameters, as in `LocalCluster`; each rank checks too.
        deterministic: whether a server adds gradients in the order of workers, as in `LocalCluster`.
        ranks: rank, number of ranks and address of rank 0; the default reads the variables of torchrun.

    Raises:
        UsageError: the variables of torchrun are not set, or an argument is invalid.
    """

    _: KW_ONLY
    address: str = "127.0.0.1"
    server: bool | None = None
    worker_at_server: bool | None = None
    workers: str = "process"
    group_size: int = 1
    groups: int = 1
    group: int = 0
    device: str = "cpu"
    slowness: Cluster | None = None
    threads: int | None = None
    wire: str = "float32"
    shards: int = 1
    standby: int = 0
    standby_sync: bool = False
    standby_address: str | None = None
    bytes_per_s: float | None = None
    faults: Sequence[Fault] = ()
    min_workers: int | None = None
    max_workers: int | None = None
    start_timeout_s: float = 300.0
    heartbeat_timeout_s: float = 60.0
    notice: str | None = None
    share_memory: bool = True
    encrypt: bool = True
    tls_cert: str | Path | None = None
    tls_key: str | Path | None = None
    tls_ca: str | Path | None = None
    debug: bool = False
    deterministic: bool = True
    ranks: LaunchEnv = field(default_factory=_launch_env, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.workers not in WORKERS:
            raise UsageError(f"workers={self.workers!r}, expected {' or '.join(WORKERS)}")
        if self.workers == "node" and not self.ranks.ranks_before:  # else they are checked without the server
            self.ranks.check_nodes()
        check_optional_range("[1, inf)", Integral, threads=self.threads)
        check_optional_range("[1, inf)", Integral, min_workers=self.min_workers, max_workers=self.max_workers)
        check_range("[1, inf)", Integral, shards=self.shards, group_size=self.group_size, groups=self.groups)
        check_range(f"[0, {self.groups - 1}]", Integral, group=self.group)
        check_groups(self.group_size, self.ranks, vars(self))
        if self.shards > self.ranks.world_size:
            raise UsageError(
                f"shards={self.shards}, but the job has {self.ranks.world_size} processes, each of which can host one "
                f"server: give at most {self.ranks.world_size}"
            )
        if self.shards > 1 and self.debug:
            raise UsageError(
                f"shards={self.shards} with debug=True, which supports one server: omit shards; parameters are equal"
            )
        check_range("[0, 1]", Integral, standby=self.standby)
        check_optional_range("(0, inf)", bytes_per_s=self.bytes_per_s)
        parse_wire(self.wire)
        check_range("(0, inf)", start_timeout_s=self.start_timeout_s)
        check_range(f"[1, {MOST_HEARTBEAT_TIMEOUT_S}]", heartbeat_timeout_s=self.heartbeat_timeout_s)
        if self.notice is not None:
            parse_notice(self.notice)
        check_device(self.device)
        is_certain = self.worker_at_server is not None or self.workers == "node" or self.max_workers is not None
        check_faults(self.faults, self.n if is_certain else self.ranks.world_size)
        check_rank(self.ranks, self.max_workers)
        files = {name: getattr(self, name) for name in TLS_FILES if getattr(self, name) is not None}
        check_tls_files(files, encrypt=self.encrypt)
        check_address(self.address, self.host, self.port, self.ranks, has_certificate=self.tls_cert is not None)

    def __str__(self) -> str:
        # A run may be resumed on other hosts, and with other workers if it is elastic.
        call = short_repr(self, without=NOT_OF_THE_RUN)
        workers = "" if self.is_elastic else f" with {counted(self.n, 'worker')}"
        return f"{call}{workers}{'' if self.has_server else NO_SERVER}"

    def fitted_to(self, plan: Plan) -> Torchrun:
        """Return these ranks with the number of workers that a plan uses.

        Raises:
            UsageError: the plan cannot run on them.
        """
        if plan.allreduce is None and self.has_server:
            fitted = replace(self, worker_at_server=self.worker_at_server or False)
        else:
            has_rank_0 = self.ranks.ranks_before == 0  # else the coordinator is a process beside the ranks
            check_without_server(plan, vars(self), may_be_apart=self.ranks.world_size == 1 or not has_rank_0)
            fitted = replace(self, worker_at_server=has_rank_0)
        check_least_workers(fitted.min_workers, fitted.n)
        if fitted.max_workers is not None:
            check_most_workers(fitted.max_workers, fitted.ranks, started=fitted.started, worker=fitted.worker)
        if fitted.standby:
            address = fitted.standby_address
            check_standby(plan, fitted.ranks, address=address, shards=fitted.shards, workers=fitted.workers)
        else:
            check_no_standby(standby_address=fitted.standby_address, standby_sync=fitted.standby_sync)
        if fitted.slowness is not None and fitted.slowness.n != (n := fitted.n):
            raise UsageError(f"slowness has {counted(fitted.slowness.n, 'worker')}, these ranks {n}: give it {n}")
        check_faults(fitted.faults, fitted.n)
        return fitted

    @property
    def has_server(self) -> bool:
        """Whether a protocol that can have a server has one."""
        return self.server is not False

    @property
    def is_elastic(self) -> bool:
        """Whether the run may begin without some workers, or admit more than were started."""
        return self.min_workers is not None or self.max_workers is not None

    @property
    def n(self) -> int:
        """Number of workers; the largest one if more than were started may join."""
        return self.started if self.max_workers is None else self.max_workers

    @property
    def started(self) -> int:
        """Number of workers that the launcher has started."""
        if self.ranks.nodes is not None and self.workers == "node":
            return self.ranks.nodes - (self._at_server == 0)
        return (self.ranks.world_size - 1 + self.has_worker_at_server) // self.group_size

    @property
    def has_worker_at_server(self) -> bool:
        """Whether a worker runs on the host of rank 0, by option or as the only worker."""
        return bool(self.worker_at_server) or (self.ranks.world_size == 1 and self.max_workers is None)

    @property
    def is_server(self) -> bool:
        """Whether this process hosts the coordinator and the server."""
        return self.ranks.rank == 0 and self.ranks.sidecar is None

    @property
    def worker(self) -> int:
        """Number of the worker in this process; n is the evaluator, and n + j the server of shard j >= 1."""
        if self.ranks.sidecar is not None:
            return self.ranks.sidecar
        if self.ranks.node is not None and self.workers == "node":
            return self.ranks.node - (self._at_server == 0)
        return (self.ranks.rank - 1 + self.has_worker_at_server) // self.group_size

    @property
    def shard_of_replica(self) -> int:
        """Number of the shard that this process has of the replica of its worker, from 0."""
        return (self.ranks.rank - 1 + self.has_worker_at_server) % self.group_size

    @property
    def place_in_worker(self) -> tuple[int, int]:
        """Number of this process among those that share the minibatches of its worker, and their number."""
        if self.group_size > 1:
            return self.shard_of_replica, self.group_size
        return self.rank_in_node, self.node_size

    @property
    def worker_name(self) -> str:
        """Name of the worker or the evaluator in this process, for messages."""
        return "the evaluator" if self.worker == self.n else f"worker {self.worker}"

    @property
    def server_name(self) -> str:
        """Name of the server in errors of this process; the evaluator, which shares the log of rank 0, adds its own."""
        return f"the evaluator: {self.ranks.server_name}" if self.worker == self.n else self.ranks.server_name

    @property
    def leaving_status(self) -> int:
        """Exit status of a process that leaves the run.

        It is 0 under torchrun, which would otherwise end the other processes of the host. Other launchers are to start
        a new process.
        """
        return 0 if self.ranks.ends_together else 128 + signal.SIGTERM

    @property
    def node_size(self) -> int:
        """Number of processes of the worker that this process belongs to."""
        if self.workers == "process" or self.worker >= self.n:
            return 1
        return self._at_server if self.ranks.node == 0 else self.ranks.local_world_size

    @property
    def rank_in_node(self) -> int:
        """Rank of this process within its worker; 0 communicates with the server."""
        has_server = self.ranks.node == 0 and not self.has_worker_at_server and not self.ranks.ranks_before
        return 0 if self.node_size == 1 else self.ranks.local_rank - has_server

    @property
    def _at_server(self) -> int:
        """Number of computing processes on the host of rank 0."""
        return self.ranks.local_world_size - 1 + self.has_worker_at_server

    @property
    def shard(self) -> int | None:
        """Number of the shard whose server this process is, >= 1; None for any other process."""
        return self.worker - self.n if self.n < self.worker < self.standby_number else None

    @property
    def standby_number(self) -> int:
        """Number of the standby, after those of the workers, the evaluator and the shard servers."""
        return self.n + self.shards

    @property
    def is_standby(self) -> bool:
        """Whether this process is the standby."""
        return self.ranks.sidecar is not None and self.worker == self.standby_number

    @property
    def has_standby(self) -> bool:
        """Whether another process goes on with the run if this one is lost."""
        return bool(self.standby) and not self.is_standby

    @property
    def ranks_of_shards(self) -> list[int]:
        """Rank of the host process of each shard server; 0 for the first."""
        return [j * self.ranks.world_size // self.shards for j in range(self.shards)]

    @property
    def sidecars_here(self) -> list[int]:
        """Numbers of the shard servers and of the standby that this process starts."""
        if self.ranks.sidecar is not None:
            return []
        shards = [self.n + j for j, rank in enumerate(self.ranks_of_shards) if j > 0 and rank == self.ranks.rank]
        is_last = self.ranks.rank == self.ranks.world_size - 1
        return [*shards, *([self.standby_number] if self.standby and is_last else [])]

    @property
    def host(self) -> str:
        """Address to listen on."""
        return self.address.rpartition(":")[0] if _has_port(self.address) else self.address

    @property
    def port(self) -> int | None:
        """Port to listen on; None if not given."""
        return int(self.address.rpartition(":")[2]) if _has_port(self.address) else None

    @property
    def worker_threads(self) -> int:
        """Number of threads of each worker, >= 1; by default an equal share of the cores of its host."""
        return self.threads or max(1, cores() // self.ranks.local_world_size)

    def has_gpu_each(self, gpus: int) -> bool:
        """Return whether every process of this host can have its own GPU out of ``gpus``, as NCCL requires."""
        return self.device == "cuda" and gpus >= self.ranks.local_world_size

    def check_plan(self, plan: Plan) -> None:
        """Raise a UsageError for several shards without a server, and for slowness with unknown times."""
        if self.shards > 1 and plan.allreduce is not None:
            raise UsageError(
                f"shards={self.shards}: {plan} has no server whose parameters could be sharded; omit shards"
            )
        check_no_censored_sleep(self.slowness)


def _has_port(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and ":" not in host and port.isdecimal()
