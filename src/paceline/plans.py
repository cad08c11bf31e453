"""Plans: protocols, phases, and what may be added to them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub("paceline", __file__)
