"""Controllers: the bundled ones, and the parts of an own one."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub("paceline", __file__)
