"""How long things take in simulation: laws of computation time, slowdowns, network and server."""

from paceline.clusters.timing.distributions import (
    LAWS,
    Deterministic,
    Empirical,
    Exponential,
    Gamma,
    HyperExponential,
    Law,
    LogNormal,
    Pareto,
    ShiftedExponential,
    Uniform,
    parse_law,
)
from paceline.clusters.timing.network import Network, ServerTime
from paceline.clusters.timing.slowdowns import Periodic, Slowdown, Timeline, Transient
from paceline.clusters.timing.trace import Row, Trace

__all__ = [
    "LAWS",
    "Deterministic",
    "Empirical",
    "Exponential",
    "Gamma",
    "HyperExponential",
    "Law",
    "LogNormal",
    "Network",
    "Pareto",
    "Periodic",
    "Row",
    "ServerTime",
    "ShiftedExponential",
    "Slowdown",
    "Timeline",
    "Trace",
    "Transient",
    "Uniform",
    "parse_law",
]
