"""Who computes: a simulated cluster with its times, or worker processes on this machine."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from numbers import Integral

from paceline.clusters.devices import check_device, cores
from paceline.clusters.faults import Fault, check_faults
from paceline.clusters.simulated import Cluster, check_no_censored_sleep
from paceline.errors import UsageError
from paceline.protocols.protocol import Plan
from paceline.utils.argument_types import checked_types
from paceline.utils.spec_parser import short_repr
from paceline.utils.validation import check_range
from paceline.utils.wording import counted


@checked_types
@dataclass(frozen=True)
class LocalCluster:
    """n worker processes on this machine.

    Args:
        n: Workers, >= 1.
        device: ``"cpu"`` or ``"cuda"``.
        slowness: Injected slowness: the seconds slept for each gradient are the compute times of this cluster
            of n simulated workers.
        respawn: Whether a worker that was lost is started again.
        threads: Threads of each worker, >= 1; None shares this machine's cores among the workers.
        faults: Failures by script, to rehearse what a run does about them.
        debug: Whether a script that changes the parameters itself ends the run: a job while it computes a gradient, a
            callback or another thread between two events. It reads all parameters several times a gradient.
    """

    n: int
    _: KW_ONLY
    device: str = "cpu"
    slowness: Cluster | None = None
    respawn: bool = False
    threads: int | None = None
    faults: Sequence[Fault] = ()
    debug: bool = False

    def __post_init__(self) -> None:
        check_range("[1, inf)", Integral, n=self.n)
        if self.threads is not None:
            check_range("[1, inf)", Integral, threads=self.threads)
        check_device(self.device)
        check_faults(self.faults, self.n)
        if self.slowness is not None and self.slowness.n != self.n:
            raise UsageError(
                f"slowness has {counted(self.slowness.n, 'worker')}, the cluster {self.n}: type {self.n} in both"
            )

    def __str__(self) -> str:
        return short_repr(self, without=("debug",))

    def check_plan(self, plan: Plan) -> None:
        """Refuse slowness of which a trace does not tell the length, and what has no server, as these workers do."""
        check_no_censored_sleep(self.slowness)
        if plan.reduction is not None:
            raise UsageError(
                f"{plan} has no server, and the workers of {self} have one; start {self.n} ranks with "
                f"torchrun --nproc-per-node {self.n} and give cluster='torchrun', a simulated cluster such as "
                f"{self.n}*exp(mean=1), or bsp in its place"
            )

    @property
    def worker_threads(self) -> int:
        """Threads of each worker: as given, or an equal share of this machine's cores, at least one."""
        return self.threads or max(1, cores() // self.n)
