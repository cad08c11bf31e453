"""Schema of run folders, and translation of `run.json` and of saved options as earlier versions wrote them.

Schema 1 (version 0.1) has no entry "schema". It describes controllers and compensators by calls in text. It has names
of classes and modules that version 0.2 has renamed, and its log has reasons that version 0.2 words differently. This is
the only module with those names and words. Schema 2 has `overlaps` in place of the `lag` of an all-reduce. Until
schema 3 DBW has no knob `pooled`: it never pooled the samples of its update times.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from paceline.errors import UsageError
from paceline.utils.files import ContentError
from paceline.utils.spec_parser import parse_call

SCHEMA = 4
_RENAMED = {
    "Extent(": "Duration(",
    "paceline.jobs.images.": "paceline.jobs.datasets.images.",
    "paceline.jobs.training.": "paceline.jobs.lr_options.",
    "paceline.metrics.": "paceline.jobs.metrics.",
}
_RENAMED_OPTIONS = {"silence": "heartbeat_timeout_s", "silence_s": "heartbeat_timeout_s", "slices": "shards"}
_REWORDED = {
    "K_0, as long as no loss is known": "K_0, until the first loss is known",
    "no k promises a gain, all workers": "no k has a positive gain, all workers",
    "no k promises a gain, as before": "no k has a positive gain, k as before",
    ": as fast as it should be": ": no longer a straggler",
    "no straggler is left": "all stragglers have recovered",
    "; it is handed back": "; it is excluded",
    ": as far as it was to go": ": end of the warm-up",
}


def upgrade(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a `run.json` in the current schema.

    Args:
        content: configuration of a run in any schema.

    Raises:
        ContentError: the schema is newer than this version of paceline.
    """
    schema = content.get("schema", 1)
    if schema > SCHEMA:
        raise ContentError(f"it has schema {schema}, expected at most {SCHEMA}; install a newer paceline")
    if schema == SCHEMA:
        return dict(content)
    phases = content.get("plan", ())
    identity = content.get("identity", {})
    if schema == 1:
        phases, identity = [_phase(phase) for phase in phases], _renamed(identity)
    plan = [_with_current_knobs(phase) for phase in phases]
    return {**content, "schema": SCHEMA, "plan": plan, "identity": identity}


def upgrade_cluster(text: str) -> str:
    """Return the text of a cluster, as typed for an earlier version, with the current names of its options.

    >>> upgrade_cluster("torchrun(slices=2, silence_s=20)")
    'torchrun(shards=2, heartbeat_timeout_s=20)'
    """
    if not re.match(r"\s*torchrun\b", text):
        return text
    return re.sub(r"\b\w+(?=\s*=)", lambda option: _RENAMED_OPTIONS.get(option[0], option[0]), text)


def _phase(phase: Mapping[str, Any]) -> dict[str, Any]:
    allreduce = phase.get("reduction")
    if allreduce is not None and allreduce["correction"] is not None:
        allreduce = {**allreduce, "correction": _part(allreduce["correction"])}
    return {
        "protocol": phase["protocol"]["$Protocol"],
        "controllers": [_part(text) for text in phase["controllers"]],
        "compensators": [_part(text) for text in phase.get("compensators", ())],
        "momentum": {"rule": phase.get("momentum", "keep")},
        "allreduce": allreduce,
        "end": {"unit": phase["end"][0], "amount": phase["end"][1]} if phase["end"] else None,
        "name": phase.get("name", ""),
    }


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


def _part(text: str) -> dict[str, Any]:
    """Return a controller or a compensator as data; the whole text is the name where it is no plain call."""
    try:
        call = parse_call(text)
    except UsageError:
        return {"name": text}
    return {"name": call.name, **call.kwargs}


def reworded(reason: str) -> str:
    """Return the reason of a decision in the log as the current version words it."""
    for old, new in _REWORDED.items():
        reason = reason.replace(old, new)
    return re.sub(r"\b(workers \d+(?:, \d+)*), (\d+ fell behind)", r"\1 and \2", reason)


def _renamed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _renamed(each) for name, each in value.items()}
    if isinstance(value, str):
        for old, new in _RENAMED.items():
            value = value.replace(old, new)
    return value
