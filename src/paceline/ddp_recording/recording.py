"""Reader of DDP recordings."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from msgspec import Meta, Struct, ValidationError, convert
from numpy.typing import NDArray

from paceline.ddp_recording import layout
from paceline.ddp_recording.collectives import steps_of
from paceline.errors import UsageError, describe_read_error
from paceline.utils import files
from paceline.utils.wording import counted, join_words, listed

LEAST_STEPS = 10
WARM_UP = 2  # steps left out: in the second one all ranks wait for the buckets that DDP rebuilds
NS = 1e-9
MOST_RANKS = 100_000
MOST_ROWS_BYTES = 1024 * files.MIB

Seconds = NDArray[np.float64]


class ModelFacts(Struct, kw_only=True):
    """Facts of one DDP model, as a rank has written them.

    Attributes:
        device: device of its parameters.
        payload_bytes: bytes of its trained parameters, and of a gradient.
        parameters: number of its trained parameters.
        bucket_bytes: bytes of each bucket that DDP sums.
    """

    device: str
    payload_bytes: Annotated[int, Meta(ge=0)]
    parameters: Annotated[int, Meta(ge=0)]
    bucket_bytes: list[int]


class OptimizerFacts(Struct):
    """Facts of the optimizer that made the first step, of a DDP model where there is one.

    Attributes:
        name: name of its class.
        momentum: largest momentum of its groups, in [0, 1); beta1 of Adam and its kind.
        is_adaptive: whether it has betas, and so divides by the size of past gradients.
    """

    name: str
    momentum: Annotated[float, Meta(ge=0, lt=1)]
    is_adaptive: bool


class RankHeader(Struct, kw_only=True):
    """Header of one rank.

    Attributes:
        schema: version of the file format.
        rank: number of the rank, >= 0.
        world_size: number of ranks, >= 1.
        host: name of its host.
        models: its DDP models.
        batch_size: size of the first dimension of the first input of the model; None if unknown.
        backend: backend of torch.distributed; empty without a model.
        torch: version of torch.
        steps_per_row: steps for which each row stands; it is the last one of them.
        optimizer: its optimizer; None if no step of one was seen, as in older recordings.
    """

    schema: int
    rank: Annotated[int, Meta(ge=0, lt=MOST_RANKS)]
    world_size: Annotated[int, Meta(ge=1, le=MOST_RANKS)]
    host: str
    models: list[ModelFacts]
    batch_size: int | None = None
    backend: str = ""
    torch: str = ""
    steps_per_row: Annotated[int, Meta(ge=1, le=1000)] = 1
    optimizer: OptimizerFacts | None = None


class GradientSample(NamedTuple):
    """Gradients of one step, over all ranks.

    Attributes:
        step: number of the step.
        loss: mean loss of the ranks.
        mean_square: mean of the squared norms of the ranks' gradients.
        squared_norm: squared norm of the mean gradient.
    """

    step: int
    loss: float
    mean_square: float
    squared_norm: float


class DDPRecording:
    """Times of a DDP run that ``paceline record`` has recorded, without the first two steps.

    Args:
        path: folder of the recording.

    Attributes:
        headers: header of each rank.
        step_numbers: numbers of the steps that all ranks recorded.
        is_coarse: whether the script has no DDP model, so that its times are those of all its collectives.
        attempts: number of starts of the ranks; the one with the most steps is read.

    Raises:
        UsageError: the folder has no recording, or only a part of one, or too few steps.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        _check_folder(self.path)
        attempts = sorted(self.path.glob(layout.ATTEMPTS))
        read = [_read_attempt(attempt) for attempt in attempts]
        if not any(ranks for ranks in read):
            raise UsageError(_without_ranks(self.path))
        self.attempts = len(attempts)
        ranks = max(read, key=lambda each: min((len(rank.rows["step"]) for rank in each), default=-1))
        self.headers = [rank.header for rank in ranks]
        self.is_coarse = any(rank.is_coarse for rank in ranks)
        _check_ranks(self.path, self.headers, self.is_coarse)
        self.step_numbers, self._columns = _aligned([rank.rows for rank in ranks])
        if self.steps < LEAST_STEPS:
            raise UsageError(
                f"{self.path} has {counted(self.steps, 'step')} that all ranks recorded after the first {WARM_UP}, "
                f"expected at least {LEAST_STEPS}; record a longer run"
            )
        self._samples = [rank.samples for rank in ranks]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.headers)

    @property
    def steps(self) -> int:
        """Number of steps that all ranks recorded."""
        return len(self.step_numbers)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all trained parameters, and of a gradient."""
        return sum(model.payload_bytes for model in self.headers[0].models)

    def part_s(self, part: str) -> Seconds:
        """Return the seconds of a part of each step: ranks x steps.

        Args:
            part: one of ``layout.PARTS``, "collectives" or "sync".
        """
        return self._columns[f"{part}_ns"]

    @cached_property
    def work_s(self) -> Seconds:
        """Own work of each rank in each step, in seconds, as ranks x steps."""
        work_s: Seconds = np.sum([self.part_s(part) for part in layout.PARTS], axis=0)
        return work_s

    @cached_property
    def sum_s(self) -> Seconds:
        """Seconds of the sums of the gradients in each step, which is the shortest wait for them of any rank."""
        sum_s: Seconds = self.part_s("sync").min(axis=0)
        return sum_s

    @cached_property
    def step_s(self) -> Seconds:
        """Length of each step, in seconds, as ranks x steps."""
        step_s: Seconds = self.work_s + self.part_s("collectives") + self.part_s("sync")
        return step_s

    @cached_property
    def gradient_samples(self) -> list[GradientSample]:
        """Sampled steps that all ranks have, in order."""
        common = set.intersection(*(set(each) for each in self._samples))
        found = []
        for step in sorted(common):
            losses, local, mean = np.mean([each[step] for each in self._samples], axis=0)
            found.append(
                GradientSample(step=step, loss=float(losses), mean_square=float(local), squared_norm=float(mean))
            )
        return [each for each in found if np.isfinite(each[1:]).all()]


class _Rank(NamedTuple):
    header: RankHeader
    rows: Mapping[str, NDArray[Any]]
    samples: Mapping[int, Sequence[float]]
    is_coarse: bool = False


def is_recording(path: str | Path) -> bool:
    """Return whether a path is the folder of a DDP recording."""
    folder = Path(path)
    return folder.is_dir() and any(True for pattern in (layout.HOSTS, layout.ATTEMPTS) for _ in folder.glob(pattern))


def _check_folder(path: Path) -> None:
    if not os.path.lexists(path):
        raise UsageError(f"there is no folder {path}; expected one that `paceline record` has written")
    if not is_recording(path):
        raise UsageError(f"{path} is not the folder of a recording; expected one that `paceline record` has written")


def _without_ranks(path: Path) -> str:
    return (
        f"{path}: no rank has imported torch; `paceline record` records processes in which the variable RANK is set, "
        "as torchrun does, and whose Python has paceline"
    )


def _read_attempt(attempt: Path) -> list[_Rank]:
    paths = [path for path in attempt.glob("rank-*.json") if path.stem.removeprefix("rank-").isdecimal()]
    headers = sorted((_read_header(path) for path in paths), key=lambda header: header.rank)
    ranks = [_read_rank(attempt, header) for header in headers]
    if any(header.models for header in headers) or not all(_has_collectives(attempt, header) for header in headers):
        return ranks
    began = [_read_rows(layout.collectives_file(attempt, each.rank), layout.COLLECTIVE_COLUMNS) for each in headers]
    rows = steps_of(began, [header.host for header in headers])
    return [rank._replace(rows=own, is_coarse=True) for rank, own in zip(ranks, rows, strict=True)]


def _has_collectives(attempt: Path, header: RankHeader) -> bool:
    return layout.collectives_file(attempt, header.rank).exists()


def _read_rank(attempt: Path, header: RankHeader) -> _Rank:
    rows = _read_rows(layout.steps_file(attempt, header.rank), layout.STEP_COLUMNS)
    samples = _read_rows(layout.gradients_file(attempt, header.rank), layout.GRADIENT_COLUMNS)
    count = header.steps_per_row
    earlier = np.tile(np.arange(1 - count, 1), rows.shape[1])
    steps, *values = rows[0].repeat(count) + earlier, *(column.repeat(count) * NS for column in rows[1:])
    return _Rank(
        header,
        dict(zip(layout.STEP_COLUMNS, [steps.astype(np.int64), *values], strict=True)),
        {int(step): values for step, *values in zip(*samples, strict=True)},
    )


def _read_header(path: Path) -> RankHeader:
    try:
        header = convert(files.read_json(path), RankHeader)
    except (OSError, files.ContentError) as error:
        raise UsageError(f"cannot read {path}: {describe_read_error(error)}") from error
    except ValidationError as error:
        raise UsageError(f"{path} is damaged: {error}") from error
    if header.schema > layout.SCHEMA:
        raise UsageError(
            f"{path} has format {header.schema}, expected at most {layout.SCHEMA}; install the paceline that wrote it"
        )
    return header


def _read_rows(path: Path, columns: Sequence[str]) -> NDArray[np.float64]:
    """Return the columns of a file; a last line without an end, of a rank that was killed, is left out."""
    if not path.exists():
        return np.zeros((len(columns), 0))
    try:
        content = files.read_bytes(path, MOST_ROWS_BYTES)
        head, *lines = content[: content.rfind(b"\n") + 1].decode().splitlines()
        if head != ",".join(columns):
            raise ValueError(f"its columns are {head[:80]!r}, expected {','.join(columns)}")
        table = np.loadtxt(lines, delimiter=",", ndmin=2) if lines else np.zeros((0, len(columns)))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {describe_read_error(error)}") from error
    return table.reshape(-1, len(columns)).T


def _check_ranks(path: Path, headers: Sequence[RankHeader], is_coarse: bool) -> None:
    world_size = max(header.world_size for header in headers)
    there = [header.rank for header in headers]
    missing = sorted(set(range(world_size)) - set(there))
    if missing:
        raise UsageError(
            f"{path} has {listed('rank', there)} of {world_size}; {join_words(missing)} missing: copy the folders that "
            "`paceline record` wrote on the other hosts into this one"
        )
    without = [header.rank for header in headers if not header.models]
    if without and not is_coarse:
        raise UsageError(
            f"{path}: {listed('rank', without)} made no DistributedDataParallel model and no collectives between steps "
            "of an optimizer, so there are no steps to read; record a script that trains with DistributedDataParallel"
        )
    if len(headers) < 2:
        raise UsageError(f"{path} has a single rank, which waits for no other; record a run of two ranks or more")


def _aligned(ranks: Sequence[Mapping[str, NDArray[Any]]]) -> tuple[NDArray[np.int64], dict[str, Seconds]]:
    """Return the steps that all ranks recorded, without the first two, and the columns as ranks x steps."""
    common = ranks[0]["step"]
    for rank in ranks[1:]:
        common = np.intersect1d(common, rank["step"])
    common = common[common >= WARM_UP]
    rows = [np.searchsorted(rank["step"], common) for rank in ranks]
    return common, {
        name: np.stack([rank[name][chosen] for rank, chosen in zip(ranks, rows, strict=True)])
        for name in layout.STEP_COLUMNS[1:]
    }
