"""Runs for which a search has found a plan."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class FoundFor:
    """Runs for which a search has found a plan; other runs are refused.

    Attributes:
        file: path of the timing file.
        job: name of the job.
        model: digest of the architecture.
        batch_size: number of samples in a worker's minibatch.
        workers: number of workers.
    """

    file: str
    job: str
    model: str
    batch_size: int
    workers: int

    def check(self, **given: object) -> None:
        """Check properties of a run, given by the names of these attributes."""
        for what, value in given.items():
            found = getattr(self, what)
            if found != value:
                raise UsageError(
                    f"{self.file} was found for {what} {found}, and this run has {value}; search again with "
                    "paceline search, or type sync_switch(fraction=...) if you know better"
                )
