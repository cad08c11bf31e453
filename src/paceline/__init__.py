"""Straggler-proof data-parallel training for PyTorch."""

import lazy_loader

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    try:
        return _load(name)
    except AttributeError as error:
        if name.startswith("_"):  # of Python's or of a tool that inspects the module
            raise
        from difflib import get_close_matches

        from paceline.utils.argument_types import NAMESPACES

        names = {part: f"{space}.{part}" for space in NAMESPACES for part in dir(_load(space))}
        names |= {part: part for part in __all__}
        near = get_close_matches(name, names, n=1)
        advice = f"; did you mean '{names[near[0]]}'?" if near else ""
        raise AttributeError(f"paceline has no {name!r}{advice}") from error
