"""Local cluster: worker processes on this machine."""

from collections.abc import Sequence
from dataclasses import KW_ONLY
from numbers import Integral

from paceline.clusters.devices import check_device, cores
from paceline.clusters.faults import Fault, check_faults
from paceline.clusters.simulated import Cluster, check_no_censored_sleep
from paceline.errors import UsageError
from paceline.protocols.protocol import Plan
from paceline.utils.checked_dataclass import checked_dataclass
from paceline.utils.spec_parser import short_repr
from paceline.utils.validation import check_optional_range, check_range
from paceline.utils.wording import counted


@checked_dataclass(frozen=True)
class LocalCluster:
    """Cluster of n worker processes on this machine.

    Args:
        n: number of workers, >= 1.
        device: device of the workers, ``"cpu"`` or ``"cuda"``.
        slowness: simulated cluster of n workers, whose compute times the workers sleep for each gradient; None for no
            injected slowness.
        respawn: whether a lost worker is started again.
        threads: number of threads of each worker, >= 1; None for an equal share of the cores of this machine.
        faults: scripted faults, to test how a run handles them.
        debug: whether the run ends when user code changes the parameters: a job while it computes a gradient, or a
            callback or another thread between two events. Each gradient then reads all parameters several times.
        deterministic: whether the server adds the gradients of an update in the order of workers, so that two runs
            whose updates accept the same gradients have equal bits; else as they arrive, which takes less time after
            the last one.
    """

    n: int
    _: KW_ONLY
    device: str = "cpu"
    slowness: Cluster | None = None
    respawn: bool = False
    threads: int | None = None
    faults: Sequence[Fault] = ()
    debug: bool = False
    deterministic: bool = True

    def __post_init__(self) -> None:
        check_range("[1, inf)", Integral, n=self.n)
        check_optional_range("[1, inf)", Integral, threads=self.threads)
        check_device(self.device)
        check_faults(self.faults, self.n)
        if self.slowness is not None and self.slowness.n != self.n:
            raise UsageError(
                f"slowness has {counted(self.slowness.n, 'worker')}, the cluster {self.n}: give {self.n} in both"
            )

    def __str__(self) -> str:
        return short_repr(self, without=("debug",))

    def check_plan(self, plan: Plan) -> None:
        """Raise a UsageError for slowness with unknown times, and for a plan without a server."""
        check_no_censored_sleep(self.slowness)
        if plan.allreduce is not None:
            raise UsageError(
                f"{plan} has no server, but the workers of {self} have one; start {self.n} ranks with "
                f"paceline run --nproc-per-node {self.n} and give cluster='torchrun', or give a simulated cluster such "
                f"as {self.n}*exp(mean=1), or the protocol bsp"
            )

    @property
    def worker_threads(self) -> int:
        """Number of threads of each worker, >= 1; by default an equal share of the cores of this machine."""
        return self.threads or max(1, cores() // self.n)
