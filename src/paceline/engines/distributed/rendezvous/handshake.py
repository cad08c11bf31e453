"""Admission of a process: the check that it runs the same job."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from paceline.clusters.launch_env import TO_JOIN
from paceline.engines.distributed.transport import messages
from paceline.engines.distributed.transport.encoded import encoded
from paceline.utils.dict_diff import changes
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)
WORLD_SIZE = "WORLD_SIZE"  # key of a job_spec
SAMPLES, FROZEN = "first and last sample", "frozen parameters"  # keys of a job_spec
OTHERS: Mapping[str, str] = {  # what a process may have other than rank 0, as keys of a job_spec, and the warning
    SAMPLES: "has another first or last sample than rank 0: give every rank the whole data set. Samples are dealt by "
    "their numbers, so data that the script has split by rank are read in part only",
    FROZEN: "has other frozen parameters than rank 0, and keeps them: call torch.manual_seed with the same seed at all "
    "ranks before the model is made, or load the same weights",
}
SAME_FOR_ALL = "give every rank the same command and code"
MAX_DIFFERENCES = 10  # in a message
MAX_SPEC_RATIO, MAX_SPEC_BYTES = 2, 1 << 14  # settings that are larger are not decoded


class RunFinished(Exception):  # noqa: N818  # every run finishes
    """Rank 0 has ended the run.

    Attributes:
        end: outcome and reason.
    """

    def __init__(self, end: messages.End) -> None:
        super().__init__(end.reason)
        self.end = end


def why_rejected(hello: messages.Hello, job_spec: dict[str, Any], workers: int) -> str:
    """Return why a process of this job may not take part, empty if it may.

    Args:
        hello: introduction of the process.
        job_spec: settings that must be equal on all processes.
        workers: numbers that a process can have, from 0.
    """
    ours, theirs = encoded(job_spec), hello.job_spec
    decoded: dict[str, Any] | None = None
    try:
        if ours == theirs:
            found = []
        elif len(theirs) > MAX_SPEC_RATIO * len(ours) + MAX_SPEC_BYTES:
            found = [f"settings of {len(theirs)} bytes, those of rank 0 have {len(ours)}"]
        else:
            decoded = msgspec.msgpack.decode(theirs, type=dict[str, Any])
            found = _changes(job_spec, decoded)
    except RecursionError:
        found = ["too deeply nested settings"]
    except msgspec.DecodeError as error:
        found = [f"settings that are none ({error})"]
    if found:
        more = f" and {len(found) - MAX_DIFFERENCES} more" if len(found) > MAX_DIFFERENCES else ""
        is_other_size = decoded is not None and job_spec.get(WORLD_SIZE) != decoded.get(WORLD_SIZE)
        advice = TO_JOIN if is_other_size else SAME_FOR_ALL
        return f"{hello.name} differs from rank 0: {'; '.join(found[:MAX_DIFFERENCES])}{more}: {advice}"
    if hello.worker not in range(workers):
        return f"{hello.name}: there is no worker {hello.worker}, only 0 to {workers - 1}; {TO_JOIN}"
    return ""


def warn_of_others(hello: messages.Hello, job_spec: dict[str, Any]) -> None:
    """Warn if a process has other data or frozen parameters than rank 0.

    It is admitted, because data may be drawn without a seed, and a loop may change frozen parameters, as a teacher.
    """
    told = msgspec.msgpack.decode(hello.job_spec, type=dict[str, Any])
    for key, warning in OTHERS.items():
        ours, theirs = job_spec.get(key), told.get(key)
        if ours and theirs and ours != theirs:
            LOG.warning("%s %s", hello.name, warning)


def _changes(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Return the differences; for plans with different names, only the names."""
    compared = [_without(each, OTHERS) for each in (ours, theirs)]
    return changes(*(_without(each, ["plan"]) for each in compared)) or changes(*compared)


def _without(job_spec: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in job_spec.items() if name not in keys}
