"""What was asked for, and the parts of the run that it asks for, put together."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from paceline.checkpoint.fingerprint import model_in_short
from paceline.clusters.local import LocalCluster
from paceline.clusters.simulated import Cluster
from paceline.clusters.torchrun import Torchrun
from paceline.core.duration import Duration
from paceline.core.stop import Stop
from paceline.errors import UsageError
from paceline.jobs.job import Job
from paceline.policies.learning_rate import ScheduleCurve
from paceline.protocols.protocol import Plan
from paceline.worker.torch_utils import build_model


@dataclass(frozen=True)
class RunConfig:
    """What was asked for.

    Attributes:
        plan: as given; `checked_plan` is the one that runs.
        evaluate_every: how often, None for the default.
        worker_timeout_s: None to derive it where workers are real, and for no timeout in a simulation.
        measure_steps: whether every step is measured.
    """

    job: Job
    plan: Plan
    cluster: Cluster | LocalCluster | Torchrun
    stop: Stop
    seed: int
    evaluate_every: Duration | None = None
    worker_timeout_s: float | None = None
    measure_steps: bool = False

    @cached_property
    def per_epoch(self) -> int | None:
        """Gradients of one epoch."""
        per_shard = self.job.minibatches_per_epoch(self.shards)
        return per_shard and per_shard * self.shards

    @property
    def shards(self) -> int:
        """Parts that the data are cut into."""
        return self.cluster.n if self.job.sharding == "partitioned" else 1

    @cached_property
    def checked_plan(self) -> Plan:
        """The plan in numbers of this run."""
        total = self.stop.workload(self.per_epoch)
        limits = {"updates": self.stop.updates, "seconds": self.stop.seconds}
        plan = self.plan.checked(self.cluster.n, total=total, per_epoch=self.per_epoch, **limits)
        self.cluster.check_plan(plan)
        if plan.found_for is not None:
            plan.found_for.check_job(
                self.job.name, model_in_short(build_model(self.job, self.seed)), self.job.batch_size
            )
        return plan

    @cached_property
    def schedule(self) -> ScheduleCurve | None:
        """The job's schedule in numbers of this run."""
        if self.job.schedule is None:
            return None
        return self.job.schedule.in_gradients(self.stop.workload(self.per_epoch), self.per_epoch)

    @cached_property
    def evaluations(self) -> Duration | None:
        """How often a version is evaluated, if there are data for it."""
        data = self.job.eval_data
        if data is None or (isinstance(data, Sized) and not len(data)):
            lacks = f"job {self.job.name} has no evaluation data" + (
                "; give it eval_data" if data is None else " in it"
            )
            if self.stop.evaluated:
                raise UsageError(f"stop {self.stop.evaluated[0]} looks at evaluations, but {lacks}")
            if data is not None or self.evaluate_every is not None:
                raise UsageError(lacks)
            return None
        if self.evaluate_every is None:
            return Duration("gradients", self.per_epoch) if self.per_epoch else Duration("updates", 100)
        return self.in_gradients(self.evaluate_every)

    def check(self) -> None:
        """Refuse what cannot run.

        Raises:
            UsageError: a part contradicts another.
        """
        _ = (self.checked_plan, self.evaluations, self.schedule)

    def in_gradients(self, extent: Duration) -> Duration:
        """Express epochs and fractions in gradients of this run."""
        return extent.in_gradients(self.stop.workload(self.per_epoch), self.per_epoch)

    @cached_property
    def rules(self) -> dict[str, Any]:
        """Everything but the plan and the stop that a coordinator goes by, as JSON can hold it."""
        return {
            "workers": self.cluster.n,
            "per_epoch": self.per_epoch,
            "minibatches": self._dealing(),
            "learning_rate": vars(self.job.learning_rate),
            "schedule": vars(self.schedule) if self.schedule else None,
            "worker_timeout_s": self.worker_timeout_s,
            "derives_timeout": self.worker_timeout_s is None and not isinstance(self.cluster, Cluster),
            "evaluate_every": vars(self.evaluations) if self.evaluations else None,
            "measure_steps": self.measure_steps,
        }

    def _dealing(self) -> dict[str, Any] | None:
        """Return how minibatches are dealt out; None where the workers draw for themselves."""
        job = self.job
        if job.sampling == "replacement" and job.sharding == "shared":
            return None
        per_epoch = job.minibatches_per_epoch(self.shards) if job.sampling == "epoch" else None
        return {
            "n": self.cluster.n,
            "per_epoch": per_epoch,
            "partitioned": job.sharding == "partitioned",
            "requeue": job.on_drop == "requeue",
        }
