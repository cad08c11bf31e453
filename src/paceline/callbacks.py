"""Callbacks of a run, and the records that they receive."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub("paceline", __file__)
