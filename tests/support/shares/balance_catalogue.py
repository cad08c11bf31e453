"""Every training loop that is balanced."""

import balance_compiled  # noqa: F401
import balance_loops  # noqa: F401
import balance_losses  # noqa: F401
import balance_passes  # noqa: F401
import balance_sharded  # noqa: F401
from balance_losses import REFERENCES
from balance_updates import LOOPS

__all__ = ["LOOPS", "REFERENCES"]
