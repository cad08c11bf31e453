"""Folder of a comparison or a search: the request, a folder per run, and the result."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from paceline.checkpoint.fingerprint import described
from paceline.errors import UsageError
from paceline.experiments.runner.cell import RunSpec
from paceline.jobs.job import Job
from paceline.recording.lock import FolderLock
from paceline.utils.dict_diff import changes
from paceline.utils.files import UNFINISHED, ContentError, read_json, replace_file, writing

Request = Mapping[str, Any]


@dataclass(frozen=True)
class FolderKind:
    """Kind of experiment in a folder.

    Attributes:
        noun: name of the kind in messages.
        request_file: name of the file with the request.
        is_complete: function from a folder and its request to whether no run is left.
    """

    noun: str
    request_file: str
    is_complete: Callable[[Path, Request], bool]


class RunsFolder:
    """Folder with the runs of one request; the same request resumes them.

    Args:
        kind: kind of the experiment.
        path: path of the folder, which is created if it does not exist.
        request: request in JSON values.

    Raises:
        UsageError: the folder contains the runs of another request, or another process uses it.
        RunError: the folder cannot be written.
    """

    def __init__(self, kind: FolderKind, path: Path, request: Request) -> None:
        self.path = path
        self.request = request
        self._kind = kind
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path} is a file; give another folder with out=, or remove the file")
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(path, f"another {kind.noun}")
        try:
            self._check_request()
        except BaseException:
            self.close()
            raise

    @classmethod
    def free(cls, kind: FolderKind, name: str, request: Request) -> RunsFolder:
        """Return the first of runs/NAME-1, NAME-2, ... that is unused, or that has this request and is incomplete."""
        for number in count(1):
            path = Path("runs") / f"{name}-{number}"
            if not path.exists() or (_saved_request(path, kind) == request and not kind.is_complete(path, request)):
                return cls(kind, path, request)
        raise AssertionError

    def save(self, contents: Mapping[str, bytes]) -> None:
        """Write the files of the result, by name."""
        with writing(f"in {self.path}"):
            for name, content in contents.items():
                replace_file(self.path / name, content)

    def close(self) -> None:
        """Release the folder for other processes."""
        self._lock.release()

    def _check_request(self) -> None:
        saved = _saved_request(self.path, self._kind)
        names = {entry.name for entry in self.path.iterdir() if not entry.name.startswith(UNFINISHED)}
        if saved == self.request:
            self.request = saved  # the names of the folders depend on its order
        elif not names - {self._kind.request_file}:
            path = self.path / self._kind.request_file
            with writing(path):
                replace_file(path, f"{json.dumps(self.request, indent=2)}\n".encode())
        elif saved is None:
            raise UsageError(f"{self.path} is not the folder of a {self._kind.noun}; give another folder with out=")
        else:
            raise UsageError(
                f"{self.path} contains another {self._kind.noun}: {'; '.join(changes(saved, self.request))}; "
                "repeat the same call to resume it, or give another folder with out="
            )


def request(job: Job, seeds: Sequence[int], **arguments: object) -> Request:
    """Return a request in plain values, for comparison with a saved one."""
    return {"job": described(job), "seeds": list(seeds), **arguments}


def cells_of(path: Path, names: Iterable[str], seeds: Iterable[int]) -> list[RunSpec]:
    """Return a run for each name and seed, ordered by seed, so that every name runs early."""
    slugs = slugs_of(names)
    return [RunSpec(name, seed, path / slug / f"seed-{seed}") for seed in seeds for name, slug in slugs.items()]


def slugs_of(names: Iterable[str]) -> dict[str, str]:
    """Return the folder name of each protocol.

    >>> slugs_of(["bsp@25% >> asp", "k_sync(k=12)", "k_sync(k='12')"])
    {'bsp@25% >> asp': 'bsp-25-asp', 'k_sync(k=12)': 'k_sync-k-12', "k_sync(k='12')": 'k_sync-k-12-2'}
    """
    slugs: dict[str, str] = {}
    for name in names:
        numbered = (slug(name) if number == 1 else f"{slug(name)}-{number}" for number in count(1))
        slugs[name] = next(free for free in numbered if free not in slugs.values())
    return slugs


def slug(name: str) -> str:
    """Return a file name for a protocol or a job.

    >>> slug("k_sync(k=12)")
    'k_sync-k-12'
    """
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.") or "unnamed"


def _saved_request(path: Path, kind: FolderKind) -> Request | None:
    try:
        saved: Request = read_json(path / kind.request_file)
        if not isinstance(saved, dict):
            raise ContentError(f"it contains {type(saved).__name__}")
    except FileNotFoundError:
        return None
    except (OSError, ContentError) as error:
        raise UsageError(f"cannot read {path / kind.request_file} ({error}); give another folder with out=") from error
    return saved
