"""`paceline token`."""

from __future__ import annotations

from paceline.clusters.job_token import make_token


def token() -> None:
    """Print a new random token for a job on several hosts: export PACELINE_TOKEN=$(paceline token)."""
    print(make_token())
