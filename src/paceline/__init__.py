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

        near = get_close_matches(name, __all__, n=1)
        advice = f"; did you mean '{near[0]}'?" if near else ""
        raise AttributeError(f"paceline has no {name!r}{advice}") from error
