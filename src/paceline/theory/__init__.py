"""Theory: expected seconds per update, staleness, error bounds and their trade-off, without running anything."""

from paceline.theory.assumptions import NoTheoryError, memoryless, new_longer_than_used, new_shorter_than_used
from paceline.theory.error_bounds import (
    Constants,
    async_error,
    async_floor,
    max_learning_rate,
    mean_squared_gradient,
    staleness_constant,
    sync_error,
    sync_floor,
    variable_rate_error,
    variable_rate_floor,
)
from paceline.theory.order_statistics import harmonic, log_harmonic, order_statistic
from paceline.theory.runtime import (
    Expected,
    async_to_batch_async,
    expected,
    log_async_to_batch_async,
    log_sync_to_async,
    sync_to_async,
)
from paceline.theory.staleness import Staleness, staleness
from paceline.theory.tradeoff import Tradeoff, tradeoff

__all__ = [
    "Constants",
    "Expected",
    "NoTheoryError",
    "Staleness",
    "Tradeoff",
    "async_error",
    "async_floor",
    "async_to_batch_async",
    "expected",
    "harmonic",
    "log_async_to_batch_async",
    "log_harmonic",
    "log_sync_to_async",
    "max_learning_rate",
    "mean_squared_gradient",
    "memoryless",
    "new_longer_than_used",
    "new_shorter_than_used",
    "order_statistic",
    "staleness",
    "staleness_constant",
    "sync_error",
    "sync_floor",
    "sync_to_async",
    "tradeoff",
    "variable_rate_error",
    "variable_rate_floor",
]
