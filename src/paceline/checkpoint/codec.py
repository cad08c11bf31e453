"""Encoding of state as JSON and tensors: plain data that cannot run code when it is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.clusters.faults import Fault
from paceline.clusters.simulated import RoundTrip
from paceline.core import events
from paceline.core.gradient import StepPlace
from paceline.errors import UsageError
from paceline.protocols.protocol import Protocol

Json = Any
Tensors = dict[str, Tensor]

_KNOWN: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        events.Accept,
        events.Apply,
        events.Compute,
        events.Evaluate,
        events.Evaluated,
        events.Joined,
        events.Lost,
        events.Minibatch,
        events.MinibatchSlice,
        events.Restarted,
        events.Step,
        events.Timer,
        Fault,
        Protocol,
        RoundTrip,
        StepPlace,
    )
}


def encode(value: Any, tensors: Tensors, path: str = "state") -> Json:
    """Return a value as JSON, and add its tensors to `tensors` under their paths.

    JSON has no tuples, sets, infinities or keys that are numbers: those become ``{"$tuple": [...]}`` and the
    like, so that `decode` gives back the same types.

    Raises:
        UsageError: the value is no plain data.

    Example:
        >>> encode({"losses": (0.5, float("inf"))}, {})
        {'losses': {'$tuple': [0.5, {'$float': 'inf'}]}}
    """
    if value is None or type(value) in {bool, int, str}:
        return value
    if isinstance(value, float | np.floating):
        return float(value) if isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, np.integer | np.bool_):
        return value.item()
    if isinstance(value, np.ndarray):
        return {"$array": [str(value.dtype), list(value.shape), encode(value.ravel().tolist(), tensors, path)]}
    if isinstance(value, Tensor):
        return {"$tensor": _keep(value, tensors, path)}
    if type(value).__name__ in _KNOWN and type(value) is _KNOWN[type(value).__name__]:
        parts = value._asdict() if hasattr(value, "_asdict") else vars(value)
        return {f"${type(value).__name__}": encode(dict(parts), tensors, path)}
    for kind, tag in ((list, ""), (tuple, "$tuple"), (set, "$set")):
        if type(value) is kind:
            items = [encode(item, tensors, f"{path}.{i}") for i, item in enumerate(value)]
            return {tag: items} if tag else items
    if isinstance(value, Mapping):
        return _encode_mapping(value, tensors, path)
    raise UsageError(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold; expected numbers, text, lists, tuples, "
        "sets, dicts, arrays or tensors (a controller can translate its state in state_dict and load_state_dict)"
    )


def decode(value: Json, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value of such JSON and tensors; the inverse of `encode`."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not (tag := next(iter(value))).startswith("$"):
        return {key: decode(item, tensors) for key, item in value.items()}
    content = value[tag]
    match tag:
        case "$float":
            return float(content)
        case "$tensor":
            return tensors[content]
        case "$array":
            dtype, shape, items = content
            return np.array(decode(items, tensors), dtype=dtype).reshape(shape)
        case "$tuple":
            return tuple(decode(content, tensors))
        case "$set":
            return set(decode(content, tensors))
        case "$dict":
            return dict(decode(content, tensors))
        case "$counter":
            return Counter(dict(decode(content, tensors)))
    return _KNOWN[tag[1:]](**decode(content, tensors))


def _encode_mapping(value: Mapping[Any, Any], tensors: Tensors, path: str) -> Json:
    items = {key: encode(item, tensors, f"{path}.{key}") for key, item in value.items()}
    is_counter = isinstance(value, Counter)
    if not is_counter and all(isinstance(key, str) and not key.startswith("$") for key in items):
        return items
    pairs = [[encode(key, tensors, path), item] for key, item in items.items()]
    return {"$counter" if is_counter else "$dict": pairs}


def _keep(tensor: Tensor, tensors: Tensors, path: str) -> str:
    name, number = path, 1
    while name in tensors:
        number += 1
        name = f"{path}.{number}"
    tensors[name] = tensor.detach().to("cpu", memory_format=torch.contiguous_format, copy=True)
    return name
