"""Named tensors in the format of safetensors, which has no complex128: such a tensor is stored as its real view."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from safetensors.torch import load, save
from torch import Tensor

COMPLEX = "complex128"  # key of the metadata: names of the tensors that are stored as real views


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the content of a file with these contiguous tensors.

    >>> from_bytes(to_bytes({"weight": torch.tensor([1 + 2j], dtype=torch.complex128)}))
    {'weight': tensor([1.+2.j], dtype=torch.complex128)}
    """
    names = [name for name, tensor in tensors.items() if tensor.dtype == torch.complex128]
    real = {name: torch.view_as_real(tensors[name].resolve_conj()) for name in names}
    return save({**tensors, **real}, {COMPLEX: json.dumps(names)} if names else None)


def from_bytes(content: bytes) -> dict[str, Tensor]:
    """Return the tensors of such a file.

    Raises:
        SafetensorError: this is no file of safetensors.
        ValueError: a tensor that is named as a real view is none.
    """
    tensors = load(content)
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    for name in json.loads(header.get("__metadata__", {}).get(COMPLEX, "[]")):
        if tensors[name].dtype != torch.float64 or tensors[name].shape[-1:] != (2,):
            raise ValueError(f"{name} is no real view of complex128")
        tensors[name] = torch.view_as_complex(tensors[name])
    return tensors
