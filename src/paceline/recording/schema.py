"""Schema of run folders, and translation of `run.json` as earlier versions wrote it.

Schema 2 has `overlaps` in place of the `lag` of an all-reduce. Until schema 3 DBW has no knob `pooled`: it never pooled
the samples of its update times.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.utils.files import ContentError

OLDEST, SCHEMA = 2, 4


def upgrade(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a `run.json` in the current schema.

    Args:
        content: configuration of a run.

    Raises:
        ContentError: this version of paceline does not read the schema.
    """
    schema = content.get("schema")
    if schema is None or schema < OLDEST:
        given = "no entry 'schema'" if schema is None else f"schema {schema}"
        raise ContentError(f"it has {given}, expected schema {OLDEST} to {SCHEMA}; start a new run")
    if schema > SCHEMA:
        raise ContentError(f"it has schema {schema}, expected at most {SCHEMA}; install a newer paceline")
    if schema == SCHEMA:
        return dict(content)
    plan = [_with_current_knobs(phase) for phase in content.get("plan", ())]
    return {**content, "schema": SCHEMA, "plan": plan}


def _with_current_knobs(phase: Mapping[str, Any]) -> dict[str, Any]:
    interrupts = phase["protocol"]["on_update"] == "interrupt"
    controllers = [
        {"pooled": not interrupts, **part} if part["name"] in {"DBW", "BDBW"} else part for part in phase["controllers"]
    ]
    return {**phase, "controllers": controllers, "allreduce": _with_lag(phase["allreduce"])}


def _with_lag(allreduce: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if allreduce is None:
        return None
    knobs = dict(allreduce)
    if "overlaps" in knobs:
        knobs["lag"] = int(knobs.pop("overlaps"))
    return knobs
