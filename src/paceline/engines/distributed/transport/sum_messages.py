"""Messages about sums: the groups that form for them, and the reports of an iteration."""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from typing import Annotated, NamedTuple

from msgspec import Meta

from paceline.core.bounds import Seconds, Whole, check_norms
from paceline.core.events import Measured, Outcome
from paceline.core.gradient import NOT_MEASURED
from paceline.core.index_bits import IndexBits
from paceline.engines.distributed.transport.encoded import at_most, decoded, encoded
from paceline.engines.distributed.transport.step_options import StepOptions
from paceline.engines.distributed.transport.task_messages import MessageStruct


class StoreKey(MessageStruct, frozen=True):
    """Key and value with which the processes of a group for sums find each other; relayed to all of them.

    Attributes:
        generation: number of the group; 0 for the group of a node.
        key: key in the store of the group.
        value: its value.
    """

    generation: int
    key: str
    value: bytes


class FormGroup(MessageStruct, frozen=True, kw_only=True):
    """The receiver takes its rank in a new group.

    Attributes:
        generation: number of the group, counted from 1.
        key: secret of the group.
        rank: rank of the receiver in the group.
        size: processes in the group.
        uses_nccl: whether NCCL sums; else gloo does.
        sums_early: whether sums may begin before it is known what counts.
    """

    generation: int
    key: str
    rank: int
    size: int
    uses_nccl: bool
    sums_early: bool = False


class GroupBroken(MessageStruct, frozen=True):
    """The sender can no longer sum in its group.

    Attributes:
        generation: number of the group.
        reason: error of the sender.
        is_unreachable: whether two members could never connect.
    """

    generation: int
    reason: str
    is_unreachable: bool


class ProgressRequest(MessageStruct, frozen=True):
    """The receiver reports how far it is in the group of this generation."""

    generation: int


class Progress(MessageStruct, frozen=True):
    """Answer to `ProgressRequest`.

    Attributes:
        generation: number of the sender's group.
        steps: reports and sums that the sender has begun in this group.
        is_summing: whether the sender waits for a sum.
    """

    generation: Whole
    steps: Whole
    is_summing: bool


class CheckLinks(MessageStruct, frozen=True):
    """The receiver checks that it can still connect to all members of the group.

    Attributes:
        generation: number of the group.
        number: number of the check in the group.
    """

    generation: int
    number: int


NO_GRADIENT = NOT_MEASURED._replace(samples=0, finite=False)


class StepReport(MessageStruct, frozen=True, kw_only=True):
    """Scalars of a worker's gradient in one iteration.

    Attributes:
        generation: number of the group.
        draw: number of the worker's task; 0 if it had none.
        measured: scalars of the gradient, with the seconds for the operations on vectors.
        factor: factor of the correction, nan for none.
        waited_s: seconds that the worker waited for the previous sum after it had its own gradient.
        interruption: why the worker ends the run; empty if it does not.
        outcome: outcome of a run that the worker ends, as the value of an `Outcome`.
        options: options of the parameter groups, as `StepOptions` encodes them.
        missing: indices of the model's parameters without a gradient, as the content of `IndexBits`.
        saves: whether the worker, which is rank 0, saves the run after the next update that is settled.
    """

    generation: Whole = 0
    draw: Whole = 0
    measured: Measured = NO_GRADIENT
    factor: float = nan
    waited_s: Seconds = 0.0
    interruption: str = ""
    outcome: Annotated[str, Meta(max_length=20)] = Outcome.INTERRUPTED
    options: bytes = b""
    missing: bytes = b""
    saves: bool = False

    def __post_init__(self) -> None:
        check_norms(self.measured.squared_norm, self.measured.variance)
        Outcome(self.outcome)
        if self.draw and not self.measured.samples:
            raise ValueError(f"draw {self.draw} of no samples")

    def why_refused(self, draw: int | None, groups: int) -> str:
        """Return what is wrong with the report, empty if nothing is.

        Args:
            draw: number of the worker's task in this iteration; None if it had none.
            groups: number of parameter groups of the optimizer.
        """
        if self.draw not in {0, draw}:
            return f"it reported draw {self.draw}, which it did not have"
        try:
            StepOptions.decode(self.options, groups)
        except ValueError as error:
            return str(error)
        return ""


class StepSummary(NamedTuple):
    """Reports of all workers in one iteration.

    Attributes:
        generation: number of the group.
        now: seconds since the run began, at rank 0, when the last report arrived.
        reforms: whether a new group forms after this iteration.
        reports: report of each worker, by its number.
    """

    generation: int
    now: float
    reforms: bool
    reports: Mapping[int, StepReport]

    def learning_rates(self, groups: int) -> tuple[float, ...]:
        """Return the learning rates of the first worker that reports some; empty if there is none.

        Args:
            groups: number of parameter groups of the optimizer.
        """
        reported = (self.reports[worker].options for worker in sorted(self.reports))
        return StepOptions.decode(next(filter(None, reported), b""), groups).learning_rates

    @property
    def missing(self) -> IndexBits:
        """Indices of the parameters that have no gradient in any report."""
        return IndexBits.in_all(each.missing for each in self.reports.values() if each.measured.finite)


class StepSummarized(MessageStruct, frozen=True, kw_only=True):
    """A `StepSummary`, whose reports stay encoded until the number of workers is known."""

    generation: int
    now: float
    reforms: bool
    reports: bytes

    @classmethod
    def of(cls, summary: StepSummary) -> StepSummarized:
        """Return the message about a summary.

        >>> reports = {0: StepReport(generation=1), 2: StepReport(generation=1, draw=7, measured=NOT_MEASURED)}
        >>> summary = StepSummary(generation=1, now=0.25, reforms=False, reports=reports)
        >>> StepSummarized.of(summary).decoded(workers=3).reports[2].draw
        7
        """
        return cls(
            generation=summary.generation, now=summary.now, reforms=summary.reforms, reports=encoded(summary.reports)
        )

    def decoded(self, workers: int) -> StepSummary:
        """Return the summary.

        Args:
            workers: number of workers.

        Raises:
            ValueError: it is none, or one of more workers.
        """
        reports = decoded(self.reports, at_most(dict[int, StepReport], workers), "reports of an iteration")
        return StepSummary(generation=self.generation, now=self.now, reforms=self.reforms, reports=reports)


class MetricsMeasured(MessageStruct, frozen=True):
    """Metrics that rank 0 has measured in the group of this generation, encoded."""

    generation: int
    metrics: bytes


SumMessage = (
    StoreKey
    | FormGroup
    | GroupBroken
    | ProgressRequest
    | Progress
    | CheckLinks
    | StepReport
    | StepSummarized
    | MetricsMeasured
)
