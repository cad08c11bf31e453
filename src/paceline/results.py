"""Results of runs, comparisons and searches, and what is estimated from them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub("paceline", __file__)
