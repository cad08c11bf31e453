"""Formats of float32 vectors on the network: dtypes, and lossy codes with error feedback."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.utils.spec_parser import bind, parse_call
from paceline.utils.validation import check_range

WIRES = ("float32", "bf16", "float16")
BLOCK = 256  # values with a scale of their own


@dataclass(frozen=True)
class IntegerCode:
    """Blockwise linear quantization: each 256 values are rounded to multiples of their largest absolute value / levels.

    Args:
        levels: largest integer, 127 in 8 bits or 7 in 4 bits.

    Source: Dettmers et al., "8-bit optimizers via block-wise quantization", 2022 (blocks; linear instead of dynamic).
    """

    levels: int

    @property
    def byte_share(self) -> float:
        """Bytes of a vector's code over those of the float32 values."""
        return (8 if self.levels > 7 else 4) / 32 + 1 / BLOCK


@dataclass(frozen=True)
class TopKCode:
    """Largest values by their absolute value, of each chunk of the vector; the others are zero.

    Args:
        share: share of the values that are sent, in (0, 1].

    Source: Stich et al., "Sparsified SGD with memory", 2018; there the largest of the whole vector.
    """

    share: float

    def __post_init__(self) -> None:
        check_range("(0, 1]", share=self.share)

    @property
    def byte_share(self) -> float:
        """Bytes of a vector's code over those of the float32 values: a value and a position of two bytes."""
        return 1.5 * self.share


Code = IntegerCode | TopKCode


def int8() -> Code:
    """Integers of 8 bits."""
    return IntegerCode(127)


def int4() -> Code:
    """Integers of 4 bits."""
    return IntegerCode(7)


def top_k(share: float) -> Code:
    """Largest values."""
    return TopKCode(share)


CODES: Mapping[str, Callable[..., Code]] = {"int8": int8, "int4": int4, "top_k": top_k}


def parse_wire(text: str) -> Code | None:
    """Return the code of a wire format such as "int8" or "top_k(share=0.01)"; None for a dtype.

    Raises:
        UsageError: there is no such format.

    >>> parse_wire("int4"), parse_wire("bf16")
    (IntegerCode(levels=7), None)
    """
    if text in WIRES:
        return None
    try:
        return bind(parse_call(text, "int8"), CODES)
    except UsageError as error:
        known = ", ".join([*WIRES, "int8", "int4"])
        raise UsageError(f"wire={text!r}: {error}; expected {known} or top_k(share=0.01)") from None
