"""Place of a rank in data that it reads itself, as a DataLoader with a state says it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from paceline.checkpoint.codec import decode, encode
from paceline.user_loop.data.loader_checks import draws_itself

TEXT = "text"


class DataPlace:
    """Place in the data of a DataLoader that has `state_dict` and `load_state_dict`, as torchdata's StatefulDataLoader.

    Args:
        loader: DataLoader of the user; None without one.
    """

    def __init__(self, loader: DataLoader[Any] | None) -> None:
        has_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._loader: Any = loader if loader is not None and has_state and draws_itself(loader) else None

    def values(self) -> dict[str, Tensor]:
        """Return the state of the loader; empty where it has none.

        Raises:
            UsageError: it is not of tensors and plain values.
        """
        if self._loader is None:
            return {}
        tensors: dict[str, Tensor] = {}
        text = json.dumps(encode(self._loader.state_dict(), tensors))
        return {TEXT: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8), **tensors}

    def restore(self, values: Mapping[str, Tensor]) -> None:
        """Continue with a saved state, from the next iteration over the loader on."""
        if self._loader is not None and values:
            self._loader.load_state_dict(decode(json.loads(values[TEXT].numpy().tobytes()), values))
