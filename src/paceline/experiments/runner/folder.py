"""The folder of a comparison or a search: what was asked, a folder a run, and the answer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from paceline.checkpoint.fingerprint import described
from paceline.errors import RunError, UsageError
from paceline.experiments.runner.cell import RunSpec
from paceline.jobs.job import Job
from paceline.recording.lock import FolderLock
from paceline.utils.dict_diff import changes
from paceline.utils.files import UNFINISHED, ContentError, read_json, replace_file

Question = Mapping[str, Any]


@dataclass(frozen=True)
class FolderKind:
    """What is asked in a folder.

    Attributes:
        noun: for people.
        question: name of the file with what was asked.
        is_answered: tells from a folder and its question whether nothing is left to be done.
    """

    noun: str
    question: str
    is_answered: Callable[[Path, Question], bool]


class RunsFolder:
    """Holds the runs of one question, which may be asked again to go on where it was.

    Args:
        kind: of the question.
        path: of the folder, which is made if it does not exist.
        question: as JSON has it.

    Raises:
        UsageError: the folder holds the runs of another question, or somebody is at work there.
        RunError: it cannot be written.
    """

    def __init__(self, kind: FolderKind, path: Path, question: Question) -> None:
        self.path = path
        self.question = question
        self._kind = kind
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(path, f"another {kind.noun}")
        except OSError as error:
            raise RunError(f"cannot write {path}: {error.strerror or error}") from error
        try:
            self._ask()
        except BaseException:
            self.close()
            raise

    @classmethod
    def free(cls, kind: FolderKind, name: str, question: Question) -> RunsFolder:
        """Return the first of runs/NAME-1, NAME-2, ... that is free, or where this question waits to go on."""
        for number in count(1):
            path = Path("runs") / f"{name}-{number}"
            if not path.exists() or (_asked(path, kind) == question and not kind.is_answered(path, question)):
                return cls(kind, path, question)
        raise AssertionError

    def save(self, contents: Mapping[str, bytes]) -> None:
        """Write the answer, as files by their names."""
        try:
            for name, content in contents.items():
                replace_file(self.path / name, content)
        except OSError as error:
            raise RunError(f"cannot write in {self.path}: {error.strerror or error}") from error

    def close(self) -> None:
        """Let others work in the folder."""
        self._lock.release()

    def _ask(self) -> None:
        asked = _asked(self.path, self._kind)
        names = {entry.name for entry in self.path.iterdir() if not entry.name.startswith(UNFINISHED)}
        has_begun = bool(names - {self._kind.question})
        if asked == self.question:
            self.question = asked  # its order gives the folders their names
        elif not has_begun:
            self._write_question()
        elif asked is None:
            raise UsageError(f"{self.path} holds something else than a {self._kind.noun}; give another with out=")
        else:
            raise UsageError(
                f"{self.path} holds another {self._kind.noun}: {'; '.join(changes(asked, self.question))}; "
                "ask the same again to go on there, or give another folder with out="
            )

    def _write_question(self) -> None:
        path = self.path / self._kind.question
        try:
            replace_file(path, f"{json.dumps(self.question, indent=2)}\n".encode())
        except OSError as error:
            raise RunError(f"cannot write {path}: {error.strerror or error}") from error


def question(job: Job, seeds: Sequence[int], **asked: object) -> Question:
    """Return what is asked for in plain values, so that it can be told whether two ask for the same."""
    return {"job": described(job), "seeds": list(seeds), **asked}


def cells_of(path: Path, names: Iterable[str], seeds: Iterable[int]) -> list[RunSpec]:
    """Return a run for each name and seed, seed by seed, so that every name is seen early."""
    slugs = slugs_of(names)
    return [RunSpec(name, seed, path / slug / f"seed-{seed}") for seed in seeds for name, slug in slugs.items()]


def slugs_of(names: Iterable[str]) -> dict[str, str]:
    """Return a name of a folder for each protocol.

    >>> slugs_of(["bsp@25% >> asp", "k_sync(k=12)", "k_sync(k='12')"])
    {'bsp@25% >> asp': 'bsp-25-asp', 'k_sync(k=12)': 'k_sync-k-12', "k_sync(k='12')": 'k_sync-k-12-2'}
    """
    slugs: dict[str, str] = {}
    for name in names:
        numbered = (slug(name) if number == 1 else f"{slug(name)}-{number}" for number in count(1))
        slugs[name] = next(free for free in numbered if free not in slugs.values())
    return slugs


def slug(name: str) -> str:
    """Return a name of a file that still tells what it is of.

    >>> slug("k_sync(k=12)")
    'k_sync-k-12'
    """
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.") or "unnamed"


def _asked(path: Path, kind: FolderKind) -> Question | None:
    try:
        asked: Question = read_json(path / kind.question)
        if not isinstance(asked, dict):
            raise ContentError(f"it holds {type(asked).__name__}")
    except FileNotFoundError:
        return None
    except (OSError, ContentError) as error:
        raise UsageError(f"cannot read {path / kind.question} ({error}); give another folder with out=") from error
    return asked
