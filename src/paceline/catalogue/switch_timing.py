"""Switch point found by a search, and its TOML file, which `sync_switch(timing=FILE)` reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import UsageError, describe_read_error
from paceline.protocols.found_for import FoundFor
from paceline.utils.files import ContentError, read_toml

_KINDS: dict[str, type | tuple[type, ...]] = {
    "job": str,
    "model": str,
    "batch_size": int,
    "workers": int,
    "first": str,
    "then": str,
    "fraction": (int, float),
}


@dataclass(frozen=True, kw_only=True)
class SwitchTiming:
    """Switch point and the runs that it was found for.

    Attributes:
        fraction: fraction of the workload after which ``then`` replaces ``first``, in (0, 1]; 1 for never.
        first: text of the first protocol.
        then: text of the second protocol.
        found_for: runs that the switch point was found for.
    """

    fraction: float
    first: str
    then: str
    found_for: FoundFor

    @classmethod
    def read(cls, file: str | Path) -> SwitchTiming:
        """Read the file that a search has written.

        Raises:
            UsageError: the file is missing, is no TOML, or lacks an entry.
        """
        try:
            _, table = read_toml(file)
        except (OSError, ContentError) as error:
            raise UsageError(
                f"cannot read the timing file {file} ({describe_read_error(error)}); paceline search writes one"
            ) from error
        _check(table, file)
        found_for = FoundFor(
            file=str(file),
            job=table["job"],
            model=table["model"],
            batch_size=table["batch_size"],
            workers=table["workers"],
        )
        return cls(fraction=float(table["fraction"]), first=table["first"], then=table["then"], found_for=found_for)

    def as_table(self) -> dict[str, Any]:
        """Return the content of the file."""
        content = {**vars(self.found_for), **vars(self)}
        return {key: content[key] for key in _KINDS}


def _check(table: dict[str, Any], file: str | Path) -> None:
    for key, kind in _KINDS.items():
        value = table.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            got = f"{key} = {value!r}" if key in table else f"no {key}"
            raise UsageError(f"timing file {file}: {got}; expected a file that paceline search has written")
    for key in ("first", "then"):
        if "timing" in table[key]:  # else a file could name itself
            raise UsageError(f"timing file {file}: {key} = {table[key]!r} reads a timing file; expected a protocol")
    if not 0 < table["fraction"] <= 1:
        raise UsageError(f"timing file {file}: fraction = {table['fraction']!r}, expected a share, > 0 and at most 1")
