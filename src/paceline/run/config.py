"""Configuration of one run, with its durations and intervals converted to gradients."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from pathlib import Path

from paceline.checkpoint.fingerprint import model_in_short
from paceline.clusters.local import LocalCluster
from paceline.clusters.simulated import Cluster
from paceline.clusters.torchrun import Torchrun
from paceline.coordinator.rules import Dealing, Rules
from paceline.core.duration import Duration
from paceline.core.stop import Stop
from paceline.errors import UsageError
from paceline.jobs.job import Job
from paceline.policies.controllers.auto import chooses_shares, with_whole_minibatches
from paceline.policies.controllers.balance import balances_of
from paceline.policies.learning_rate import ScheduleCurve
from paceline.policies.noise_rule import NoiseRule
from paceline.protocols.plan_checks import checked_plan
from paceline.protocols.protocol import Plan
from paceline.run.noise_reference import reference_of
from paceline.utils.rank_logger import RankLogger
from paceline.utils.validation import check_range
from paceline.utils.wording import counted
from paceline.worker.torch_utils import build_model

LOG = RankLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Configuration of one run, as the user gave it.

    Attributes:
        plan: plan before the check; the run uses `checked_plan`.
        seed: seed of all random numbers, >= 0.
        evaluate_every: interval between evaluations; None for the default.
        worker_timeout_s: timeout of the failure detector in seconds, > 0; None to derive it from the round trips of
            real workers, and for no timeout in a simulation.
        measure_steps: whether to record how far each update moves the parameters.
        folder: folder of the run, as this process was given it; None for a run without one.
    """

    job: Job
    plan: Plan
    cluster: Cluster | LocalCluster | Torchrun
    stop: Stop
    seed: int
    evaluate_every: Duration | None = None
    worker_timeout_s: float | None = None
    measure_steps: bool = False
    folder: str | Path | None = None

    @cached_property
    def per_epoch(self) -> int | None:
        """Number of gradients per epoch, None for data without a length."""
        return self.job.gradients_per_epoch(self.cluster.n)

    @property
    def shards(self) -> int:
        """Number of parts that the data set is divided into."""
        return self.cluster.n if self.job.sharding == "partitioned" else 1

    @cached_property
    def checked_plan(self) -> Plan:
        """Plan with its durations in gradients, checked against job and cluster."""
        check_range("[0, inf)", Integral, seed=self.seed)
        total = self.stop.workload(self.per_epoch)
        limits = {"updates": self.stop.updates, "seconds": self.stop.seconds}
        given = with_whole_minibatches(self.plan) if self.why_not_cut else self.plan
        plan = checked_plan(given, self.cluster.n, total=total, per_epoch=self.per_epoch, **limits)
        self.cluster.check_plan(plan)
        if plan.found_for is not None:
            model = model_in_short(build_model(self.job, self.seed))
            plan.found_for.check(job=self.job.name, model=model, batch_size=self.job.batch_size)
        if plan.local_steps is not None:
            self._check_local_steps(plan)
        if plan.sets_shares:
            self._check_shares(plan)
        if self.job.weight is not None:
            self._check_weight(plan)
        return plan

    def _check_local_steps(self, plan: Plan) -> None:
        job = self.job
        if job.lr_rule != "constant" or job.lr_is != "total" or job.schedule is not None:
            raise UsageError(
                f"{plan}: the workers step with the rate of the optimizer and of scheduler=, but job {job.name} has "
                f"lr_rule={job.lr_rule!r}, lr_is={job.lr_is!r} and schedule={job.schedule}; leave them out"
            )

    def _check_shares(self, plan: Plan) -> None:
        job = self.job
        if reason := self.why_not_cut:
            raise UsageError(
                f"{plan}: a worker computes samples of other workers' minibatches, but {reason}; give data with "
                "numbered samples and sharding='shared', or type bsp"
            )
        if chooses_shares(plan):
            return
        for controller in balances_of(plan):
            size = controller.sizes(job.batch_size).size
            if size * controller.pieces != job.batch_size:
                m, piece = controller.pieces, counted(size, "sample")
                LOG.warning(
                    f"{plan}: a minibatch of {job.batch_size} samples has no {m} equal pieces, so a piece has {piece}: "
                    f"give a batch size that {m} divides, or another m"
                )

    @property
    def why_not_cut(self) -> str:
        """Why the data of the job cannot be divided among workers anew; empty if they can."""
        job = self.job
        if not job.is_iterable and job.sharding != "partitioned":
            return ""
        data = "iterable data" if job.is_iterable else "sharding='partitioned'"
        return f"with {data} of job {job.name} each worker reads its own"

    def _check_weight(self, plan: Plan) -> None:
        is_node = isinstance(self.cluster, Torchrun) and self.cluster.workers == "node"
        if plan.allreduce or plan.local_steps or is_node:
            what = "workers='node'" if is_node else plan
            raise UsageError(
                f"job {self.job.name} has a weight, but {what} takes means by samples: leave weight out, or type bsp"
                f"{' and omit workers' if is_node else ''}"
            )

    @cached_property
    def schedule(self) -> ScheduleCurve | None:
        """Learning-rate schedule of the job with its durations in gradients."""
        if self.job.schedule is None:
            return None
        return self.job.schedule.in_gradients(self.stop.workload(self.per_epoch), self.per_epoch)

    @cached_property
    def noise(self) -> NoiseRule | None:
        """Reference of the learning-rate rule "noise"; None for another rule."""
        follows = [str(phase) for phase in self.plan.phases for each in phase.controllers if each.reads == "noise"]
        if self.job.lr_rule != "noise" and not follows:
            if self.job.lr_of != "bsp":
                raise UsageError(
                    f"job {self.job.name}: lr_of={self.job.lr_of!r} has no effect with lr_rule={self.job.lr_rule!r}; "
                    "give lr_rule='noise', or leave lr_of out"
                )
            return None
        if self.job.lr_rule == "proportional" or self.job.lr_is != "total":
            raise UsageError(
                f"{follows[0]} sets the learning rate by the rule 'noise', but job {self.job.name} has "
                f"lr_rule={self.job.lr_rule!r} and lr_is={self.job.lr_is!r}; leave both out"
            )
        return reference_of(self.job, build_model(self.job, self.seed), self.plan, self.cluster.n)

    @cached_property
    def evaluations(self) -> Duration | None:
        """Interval between evaluations; None without evaluation data."""
        data = self.job.eval_data
        if data is None or (isinstance(data, Sized) and not len(data)):
            reason = f"job {self.job.name} has " + (
                "no evaluation data; give it eval_data" if data is None else "empty evaluation data"
            )
            if self.stop.evaluated:
                raise UsageError(f"stop {self.stop.evaluated[0]} needs evaluations, but {reason}")
            if data is not None or self.evaluate_every is not None:
                raise UsageError(reason)
            return None
        if self.evaluate_every is None:
            return Duration("gradients", self.per_epoch) if self.per_epoch else Duration("updates", 100)
        return self.in_gradients(self.evaluate_every)

    def check(self) -> None:
        """Check the configuration.

        Raises:
            UsageError: two settings contradict each other.
        """
        _ = (self.checked_plan, self.evaluations, self.schedule, self.noise)

    def in_gradients(self, duration: Duration) -> Duration:
        """Convert epochs and fractions of this run to gradients."""
        return duration.in_gradients(self.stop.workload(self.per_epoch), self.per_epoch)

    @cached_property
    def rules(self) -> Rules:
        """Settings of the coordinator beside plan and stop."""
        return Rules(
            workers=self.cluster.n,
            per_epoch=self.per_epoch,
            minibatches=self._dealing(),
            learning_rate=self.job.learning_rate,
            noise=self.noise,
            schedule=self.schedule,
            batch_size=self.job.batch_size,
            worker_timeout_s=self.worker_timeout_s,
            # Silence in simulated time is no fault (decision 0010).
            derives_timeout=self.worker_timeout_s is None and not isinstance(self.cluster, Cluster),
            evaluate_every=self.evaluations,
            measure_steps=self.measure_steps,
        )

    def _dealing(self) -> Dealing | None:
        """Return how the coordinator assigns minibatches; None where each worker draws its own."""
        job = self.job
        if job.sampling == "replacement" and job.sharding == "shared":
            return None
        return Dealing(
            n=self.cluster.n,
            per_epoch=job.minibatches_per_epoch(self.shards) if job.sampling == "epoch" else None,
            partitioned=job.sharding == "partitioned",
            requeue=job.on_drop == "requeue",
            ahead=job.minibatches_ahead if self.plan.local_steps is None else 0,  # a work names its own minibatches
        )
