"""Worker processes on one machine: parameters and gradients in shared memory, nothing copied on their side."""

from paceline.engines.local.engine import LocalEngine

__all__ = ["LocalEngine"]
