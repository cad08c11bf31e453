"""Whether runs trained the same job, so that it means something to set them side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.errors import UsageError
from paceline.run_folder import SavedRun

JOB_KEYS = ("job", "batch_size", "parameters")
IDENTITY = "identity"  # whatever else tells one job from another, where it was written down


def refuse_different_jobs(runs: Sequence[SavedRun]) -> None:
    """Refuse runs of different jobs.

    Protocols, clusters, seeds and stops may differ: they are what is compared.

    Raises:
        UsageError: two runs differ in their job; says in what.
    """
    for other in runs[1:]:
        first = runs[0]
        for key, ours, theirs in _differences(first.configuration, other.configuration):
            raise UsageError(
                f"{first.path} and {other.path} trained different jobs: {key} = {ours!r} and {theirs!r}; "
                "expected runs of one job"
            )


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for key in JOB_KEYS:
        if ours.get(key) != theirs.get(key):
            yield key, ours.get(key), theirs.get(key)
    if IDENTITY in ours and IDENTITY in theirs:
        our_identity, their_identity = ours[IDENTITY], theirs[IDENTITY]
        for key in sorted({*our_identity, *their_identity}):
            if our_identity.get(key) != their_identity.get(key):
                yield key, our_identity.get(key), their_identity.get(key)
