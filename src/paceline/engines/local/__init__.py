"""Worker processes on one machine, with parameters and gradients in shared memory and no copies in the workers."""

from paceline.engines.local.engine import LocalEngine

__all__ = ["LocalEngine"]
