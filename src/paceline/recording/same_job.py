"""Whether runs trained the same job, so that it means something to set them side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.errors import UsageError
from paceline.recording.difference import differences
from paceline.recording.run_folder import SavedRun

KEYS = ("job", "batch_size", "parameters", "identity")


def refuse_different_jobs(runs: Sequence[SavedRun]) -> None:
    """Refuse runs of different jobs.

    Protocols, clusters, seeds and stops may differ: they are what is compared.

    Raises:
        UsageError: two runs differ in their job; says in what.
    """
    for other in runs[1:]:
        first = runs[0]
        for name, ours, theirs in differences(_job(first), _job(other)):
            raise UsageError(
                f"{first.path} and {other.path} trained different jobs: {name} = {ours!r} and {theirs!r}; "
                "expected runs of one job"
            )


def _job(run: SavedRun) -> dict[str, Any]:
    return {key: run.configuration.get(key) for key in KEYS}
