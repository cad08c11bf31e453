"""Messages about sums without a server: what the coordinator announces, and what the ranks have made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

from msgspec import Meta

from paceline.core.bounds import LONGEST_TEXT, Whole
from paceline.core.events import Apply, Minibatch, Step
from paceline.core.gradient import StepPlace
from paceline.core.index_bits import IndexBits
from paceline.engines.distributed.transport.encoded import decoded, encoded
from paceline.engines.distributed.transport.task_messages import MessageStruct

MOST_STEP_BYTES = 64
LOST = -1  # place of a gradient that no rank has
OF_REPLICA = "shards"  # beginning of the keys of the ranks that have the shards of one replica


class SummedGradient(NamedTuple):
    """Gradient that counts in a sum.

    Attributes:
        worker: number of its worker.
        draw: number of the worker's task.
        weight: what it counts in the mean of an update, > 0.
        at: number of the worker whose rank has it; another one if its own was lost; `LOST` if no rank has it.
    """

    worker: int
    draw: int
    weight: float
    at: int


class AnnounceSum(MessageStruct, frozen=True, kw_only=True):
    """The ranks sum the gradients that count, and each makes the update of which they are the last ones.

    Attributes:
        number: number of the sum, counted from 1.
        gradients: gradients that count, encoded.
        missing: indices of the model's parameters without a gradient in the sum, as the content of `IndexBits`.
        update: update that is made then, encoded; empty if it is still to come.
        options: options of its step, as `StepOptions` encodes them.
        early: number of the group that has begun the sum early; 0 for none.
    """

    number: int
    gradients: bytes
    missing: bytes = b""
    update: bytes = b""
    options: bytes = b""
    early: int = 0

    @classmethod
    def of(
        cls,
        number: int,
        gradients: Sequence[SummedGradient],
        missing: IndexBits,
        update: Apply | None,
        *,
        options: bytes = b"",
        early: int = 0,
    ) -> AnnounceSum:
        """Return the message about a sum.

        >>> gradient = SummedGradient(worker=2, draw=7, weight=16.0, at=2)
        >>> announced = AnnounceSum.of(1, [gradient], IndexBits.of([]), None)
        >>> announced.summed, announced.made
        ([SummedGradient(worker=2, draw=7, weight=16.0, at=2)], None)
        """
        return cls(
            number=number,
            gradients=encoded(gradients),
            missing=missing.content,
            update=encoded(update) if update is not None else b"",
            options=options,
            early=early,
        )

    @property
    def summed(self) -> list[SummedGradient]:
        """Gradients that count.

        Raises:
            ValueError: they are none.
        """
        gradients: list[SummedGradient] = decoded(self.gradients, list[SummedGradient], "gradients of a sum")
        return gradients

    @property
    def made(self) -> Apply | None:
        """Update that is made then; None if it is still to come.

        Raises:
            ValueError: it is none.
        """
        return decoded(self.update, Apply, "an update") if self.update else None


class StepMade(MessageStruct, frozen=True):
    """The sender has made an update, of which rank 0 has to know something.

    Attributes:
        version: number of the new version.
        step: its step, encoded; empty if it was not measured.
        not_finite: why its parameters are not finite; empty if they are.
    """

    version: Whole
    step: bytes
    not_finite: Annotated[str, Meta(max_length=LONGEST_TEXT)] = ""

    @classmethod
    def of(cls, version: int, step: Step | None, not_finite: str) -> StepMade:
        """Return the message about an update; the arguments are the fields.

        >>> StepMade.of(7, None, "weight is inf").measured
        >>> StepMade.of(7, Step(0.5, 0.25, 0.125, 0.1, 0.1), "").measured.progress
        0.25
        """
        return cls(version, encoded(step) if step is not None else b"", not_finite)

    @property
    def measured(self) -> Step | None:
        """Step of the update; None if it was not measured.

        Raises:
            ValueError: it is none.
        """
        return decoded(self.step, Step, "a step", MOST_STEP_BYTES) if self.step else None


class BeginShards(MessageStruct, frozen=True, kw_only=True):
    """The receiver, which has a shard of the replica of its worker, begins with a version.

    Attributes:
        version: number of the newest version.
        made: number of the newest sum; -1 if the receiver takes the state of another one that has the same shard.
        loads: whether it loads its state from the folder of the run.
        generation: number of the group of the ranks that have the shards of this replica.
        key: secret of that group.
    """

    version: int
    made: int
    loads: bool
    generation: int
    key: str


class SendState(MessageStruct, frozen=True):
    """The receiver sends rank 0 its parameters and the state of its optimizer, in the group of both."""


class StateFollows(MessageStruct, frozen=True):
    """The sender has made all sums that were announced before `SendState`, and sends its state now."""


class SaveShards(MessageStruct, frozen=True):
    """The receiver saves its shard after all sums that were announced before, as that of this version."""

    version: int


class ShardSaved(MessageStruct, frozen=True):
    """Answer to `SaveShards`.

    Attributes:
        version: version of the shard.
        reason: why it is not saved; empty if it is.
    """

    version: Whole
    reason: Annotated[str, Meta(max_length=LONGEST_TEXT)] = ""


class SumsMade(MessageStruct, frozen=True):
    """All ranks of a new group have made the same sums, of which one of them may have brought the others the last ones.

    Attributes:
        generation: number of the group.
        number: number of the last one of these sums; 0 for none.
    """

    generation: Whole
    number: Whole


class RecomputeGradient(MessageStruct, frozen=True, kw_only=True):
    """The receiver computes the gradient of a worker that is gone, which counts in a sum.

    Attributes:
        number: number of the sum.
        worker: number of that worker.
        draw: number of its task.
        weight: what it counts in the mean of an update.
        run_s: seconds since the run began.
        minibatch: its minibatch, encoded; empty where workers draw their samples.
        step_place: place of its step in a loop with several optimizers; None in another one.
    """

    number: int
    worker: int
    draw: int
    weight: float
    run_s: float
    minibatch: bytes = b""
    step_place: StepPlace | None = None

    @property
    def decoded(self) -> Minibatch | None:
        """Minibatch; None where workers draw their samples.

        Raises:
            ValueError: it is none.
        """
        return decoded(self.minibatch, Minibatch, "a minibatch") if self.minibatch else None


class GradientRecomputed(MessageStruct, frozen=True):
    """Answer to `RecomputeGradient`.

    Attributes:
        worker: number of the worker that is gone.
        draw: number of its task.
        is_here: whether the sender has the gradient; its computation was cancelled else.
    """

    worker: Whole
    draw: Whole
    is_here: bool


class ResumeSums(MessageStruct, frozen=True):
    """The ranks go on, in the group of this generation, with the sums that they have not made.

    Attributes:
        generation: number of the group.
        gradients: gradients of these sums, encoded: some are at another rank now. One of a version that all ranks
            lacked is still lost: its sum fails after those before it, and then it is computed.
    """

    generation: int
    gradients: bytes

    @property
    def decoded(self) -> list[SummedGradient]:
        """Gradients of these sums.

        Raises:
            ValueError: they are none.
        """
        gradients: list[SummedGradient] = decoded(self.gradients, list[SummedGradient], "gradients of sums")
        return gradients


RankAnswer = StepMade | StateFollows | ShardSaved | SumsMade | GradientRecomputed  # to the coordinator
AnnouncedMessage = RankAnswer | AnnounceSum | BeginShards | SendState | SaveShards | RecomputeGradient | ResumeSums
