"""Who computes, when torchrun (or Slurm, Kubernetes, a shell with the same variables) starts the processes."""

from __future__ import annotations

import ipaddress
import os
import signal
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from numbers import Integral

from paceline.clusters.devices import check_device, cores
from paceline.clusters.faults import Fault, check_faults
from paceline.clusters.launch_env import TOKEN, LaunchEnv
from paceline.clusters.local import LocalCluster
from paceline.clusters.simulated import Cluster, check_no_censored_sleep
from paceline.errors import UsageError
from paceline.protocols.protocol import Plan
from paceline.utils.argument_types import checked_types
from paceline.utils.spec_parser import short_repr
from paceline.utils.validation import check_range
from paceline.utils.wording import counted

WIRES = ("float32", "bf16", "float16")
WORKERS = ("process", "node")


@checked_types
@dataclass(frozen=True)
class Torchrun:
    """The processes of a job that torchrun has started: rank 0 hosts coordinator and server, the others are workers.

    How many workers there are is not said here but by torchrun. Every rank calls `pl.train` with the same arguments.
    A job of one process is server and worker.

    With ``workers="node"`` the processes of a host are one worker. Each computes its share of the samples of every
    minibatch, the shares are added up within the host (gloo; on GPUs of their own NCCL), and its first process
    speaks for all of them. On rank 0's host these are the other processes, and the one beside rank 0 if there is
    one; a host where rank 0 is alone is no worker.

    Args:
        address: of rank 0's host, on which the server listens, as ``"10.0.0.1"``; ``"10.0.0.1:29511"`` if the port
            matters. Only this machine can reach the default.
        worker_at_server: whether a process beside rank 0 is a worker too. Without a server (all_reduce, local_sgd,
            s3gd, dc_s3gd) every rank is a worker, so leave it out.
        workers: What a worker is: a "process", or a "node", all processes of a host.
        device: Of the workers, ``"cpu"`` or ``"cuda"``, which has not been run on a GPU yet.
        slowness: Injected slowness, as in `LocalCluster`.
        threads: Threads of each worker, >= 1; None shares a host's cores among its ranks.
        wire: The numbers in which parameters and gradients of float32 travel, "float32", "bf16" or "float16": half the
            bytes, rounded to nearest. The server's own stay float32, and so do a worker's sums; buffers and other
            types travel as they are. bf16 keeps 8 bits of a number (relative error up to 2^-9) and float32's range;
            float16 keeps 11 (2^-12) and overflows beyond 65504: such a gradient is not finite and is dropped.
            Whatever the numbers, parts of a gradient leave before the backward pass has ended, but for
            ``workers="node"`` and on CUDA, where it leaves when it is complete.
        slices: Servers that the parameters are shared out to, from 1 to the number of processes: the first one is at
            rank 0, the others are spread over the other hosts, beside rank j * processes // slices. Workers send each
            of them its part of a gradient, over the link of its host. Parameters come out the same but for rounding.
        bytes_per_s: Of rank 0's link, in each direction, > 0, for the line that tells how busy it will be; None to
            measure it with the first gradients.
        faults: Failures by script, to rehearse what a run does about them.
        start_timeout_s: Seconds in which every rank has to be there, > 0.
        elastic: Whether workers without a server go on when some of them are gone, and take in who comes later.
        silence_s: Seconds after which a host that does not answer any more (powered off, its cable cut) is taken for
            gone, >= 1. The host of a process that hangs still answers.
        debug: Whether a script that changes the parameters itself ends the run, as in `LocalCluster`; workers also
            compare every version to the server's. Without a server each rank watches what it has learned itself.

    Raises:
        UsageError: this process was not started by torchrun, nor as torchrun would.
    """

    _: KW_ONLY
    address: str = "127.0.0.1"
    worker_at_server: bool | None = None
    workers: str = "process"
    device: str = "cpu"
    slowness: Cluster | None = None
    threads: int | None = None
    wire: str = "float32"
    slices: int = 1
    bytes_per_s: float | None = None
    faults: Sequence[Fault] = ()
    start_timeout_s: float = 300.0
    elastic: bool = False
    silence_s: float = 60.0
    debug: bool = False
    ranks: LaunchEnv = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", LaunchEnv.from_environment(os.environ))
        if self.workers not in WORKERS:
            raise UsageError(f"workers={self.workers!r}, expected {' or '.join(WORKERS)}")
        if self.workers == "node":
            self.ranks.check_nodes()
        if self.threads is not None:
            check_range("[1, inf)", Integral, threads=self.threads)
        check_range("[1, inf)", Integral, slices=self.slices)
        if self.slices > self.ranks.world_size:
            raise UsageError(
                f"slices={self.slices}, but the job has {self.ranks.world_size} processes, each of which can host one: "
                "give at most that many"
            )
        if self.slices > 1 and self.debug:
            raise UsageError(
                f"slices={self.slices} with debug=True, which watches one server; leave slices out while you look for "
                "what changes the parameters, which come out the same"
            )
        if self.bytes_per_s is not None:
            check_range("(0, inf)", bytes_per_s=self.bytes_per_s)
        if self.wire not in WIRES:
            raise UsageError(f"wire={self.wire!r}, expected {', '.join(WIRES[:-1])} or {WIRES[-1]}")
        check_range("(0, inf)", start_timeout_s=self.start_timeout_s)
        check_range("[1, inf)", silence_s=self.silence_s)
        check_device(self.device)
        is_certain = self.worker_at_server is not None or self.workers == "node"
        check_faults(self.faults, self.n if is_certain else self.ranks.world_size)
        self._check_address()

    def __str__(self) -> str:
        # A run may go on from other hosts, and with other workers if they are elastic.
        told = short_repr(self, without=("address", "start_timeout_s", "silence_s", "bytes_per_s", "slices", "debug"))
        if self.elastic:
            return told
        return f"{told} with {counted(self.n, 'worker')}"

    def fitted_to(self, plan: Plan) -> Torchrun:
        """Return these ranks with as many workers as a plan makes of them.

        Raises:
            UsageError: the plan cannot run on them.
        """
        if plan.allreduce is None:
            fitted = replace(self, worker_at_server=self.worker_at_server or False)
            if self.elastic:
                raise UsageError(
                    f"elastic=True: {plan} has a server, which takes in and lets go workers as it is; leave elastic out"
                )
        else:
            fitted = replace(self, worker_at_server=True)
            if self.worker_at_server is False and self.ranks.world_size > 1:
                raise UsageError(
                    f"worker_at_server=False: {plan} has no server, so every rank is a worker; "
                    "leave worker_at_server out"
                )
            if self.workers != "process":
                raise UsageError(
                    f"workers={self.workers!r}: {plan} has no server, so every process is a worker; leave workers out, "
                    "or take a protocol with a server, such as bsp"
                )
            if self.wire != "float32":
                raise UsageError(f"wire={self.wire!r}: {plan} sums float32 as it is; leave wire out")
        if fitted.slowness is not None and fitted.slowness.n != fitted.n:
            n = fitted.n
            raise UsageError(f"slowness has {counted(fitted.slowness.n, 'worker')}, these ranks {n}: give it {n}")
        check_faults(fitted.faults, fitted.n)
        return fitted

    @property
    def n(self) -> int:
        """Workers."""
        if self.ranks.nodes is not None and self.workers == "node":
            return self.ranks.nodes - (self._at_server == 0)
        return self.ranks.world_size - 1 + self.has_worker_at_server

    @property
    def has_worker_at_server(self) -> bool:
        """Whether there is one: asked for, or the only one."""
        return bool(self.worker_at_server) or self.ranks.world_size == 1

    @property
    def is_server(self) -> bool:
        """Whether this process hosts coordinator and server."""
        return self.ranks.rank == 0 and self.ranks.assistant is None

    @property
    def worker(self) -> int:
        """The number of the worker that this process is; n evaluates, and n + j is the server of slice j >= 1."""
        if self.ranks.assistant is not None:
            return self.ranks.assistant
        if self.ranks.node is not None and self.workers == "node":
            return self.ranks.node - (self._at_server == 0)
        return self.ranks.rank - 1 + self.has_worker_at_server

    @property
    def leaving_status(self) -> int:
        """With which a process ends that was told to: torchrun would end the neighbours of one that fails.

        Anybody else is to start another one in its place.
        """
        return 0 if self.ranks.has_agent else 128 + signal.SIGTERM

    @property
    def team_size(self) -> int:
        """Processes of the worker that this one belongs to."""
        if self.workers == "process" or self.worker >= self.n:
            return 1
        return self._at_server if self.ranks.node == 0 else self.ranks.local_world_size

    @property
    def place(self) -> int:
        """The number of this process among those of its worker; 0 speaks for all of them."""
        if self.team_size == 1:
            return 0
        return self.ranks.local_rank - (self.ranks.node == 0 and not self.has_worker_at_server)

    @property
    def _at_server(self) -> int:
        """Processes on rank 0's host that compute."""
        return self.ranks.local_world_size - 1 + self.has_worker_at_server

    @property
    def slice(self) -> int | None:
        """The number of the slice whose server this process is, beside another rank than 0."""
        return self.worker - self.n if self.worker > self.n else None

    @property
    def ranks_of_slices(self) -> list[int]:
        """The rank beside which the server of each slice is, with 0 for the first."""
        return [j * self.ranks.world_size // self.slices for j in range(self.slices)]

    @property
    def slices_here(self) -> list[int]:
        """The numbers of the slices whose servers this process starts beside itself."""
        if self.ranks.assistant is not None:
            return []
        return [j for j, rank in enumerate(self.ranks_of_slices) if j > 0 and rank == self.ranks.rank]

    @property
    def host(self) -> str:
        """The address to listen on."""
        return self.address.rpartition(":")[0] if _has_port(self.address) else self.address

    @property
    def port(self) -> int | None:
        """The port to listen on, if it was given."""
        return int(self.address.rpartition(":")[2]) if _has_port(self.address) else None

    @property
    def worker_threads(self) -> int:
        """Threads of each worker: as given, or an equal share of its host's cores, at least one."""
        return self.threads or max(1, cores() // self.ranks.local_world_size)

    def has_gpu_each(self, gpus: int) -> bool:
        """Return whether every process of this host, which has so many GPUs, has one of its own, as NCCL needs it."""
        return self.device == "cuda" and gpus >= self.ranks.local_world_size

    def check_plan(self, plan: Plan) -> None:
        """Refuse slices where there is no server, and slowness of which a trace does not tell the length."""
        if self.slices > 1 and plan.allreduce is not None:
            raise UsageError(
                f"slices={self.slices}: {plan} has no server whose parameters could be shared out; leave slices out"
            )
        check_no_censored_sleep(self.slowness)

    def _check_address(self) -> None:
        if not isinstance(self.address, str) or not self.host or "/" in self.address:
            raise UsageError(f"address={self.address!r}: expected a host or host:port, as 10.0.0.1 or 10.0.0.1:29511")
        if not is_loopback(self.host):
            if self.ranks.token.startswith("run "):
                raise UsageError(
                    f"address={self.address!r} can be reached from elsewhere: set {TOKEN} to a secret, the same on "
                    "every host, so that nobody else can take part"
                )
        elif self.ranks.local_world_size < self.ranks.world_size and not is_loopback(self.ranks.master[0]):
            raise UsageError(
                f"the ranks are on several hosts, which cannot reach {self.address}: give the address of rank 0's "
                f"host, as pl.Torchrun(address='{self.ranks.master[0]}'), and set {TOKEN}"
            )


def without_torchrun(cluster: Cluster | LocalCluster | Torchrun, what: str) -> Cluster | LocalCluster:
    """Return a cluster, or refuse ranks where several runs are to be made, one after another."""
    if isinstance(cluster, Torchrun):
        raise UsageError(f"{what} makes several runs, which torchrun's ranks do not; give local:4 or 4*exp(mean=1)")
    return cluster


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine's alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _has_port(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and ":" not in host and port.isdecimal()
