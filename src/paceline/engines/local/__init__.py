"""Worker processes on one machine, with parameters and gradients in shared memory and no copies in the workers."""

from paceline.engines.local.workers import LocalWorkers

__all__ = ["LocalWorkers"]
