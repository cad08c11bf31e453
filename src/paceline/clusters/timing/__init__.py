"""How long things take in simulation: laws of computation time, slowdowns, network and server."""

from paceline.clusters.timing.distributions import (
    LAWS,
    Deterministic,
    Distribution,
    Empirical,
    Exponential,
    Gamma,
    HyperExponential,
    LogNormal,
    Pareto,
    ShiftedExponential,
    Uniform,
    parse_law,
)
from paceline.clusters.timing.network import Network, ServerTime
from paceline.clusters.timing.slowdowns import Periodic, Slowdown, SlownessProfile, Transient
from paceline.clusters.timing.trace import Trace, TraceRow

__all__ = [
    "LAWS",
    "Deterministic",
    "Distribution",
    "Empirical",
    "Exponential",
    "Gamma",
    "HyperExponential",
    "LogNormal",
    "Network",
    "Pareto",
    "Periodic",
    "ServerTime",
    "ShiftedExponential",
    "Slowdown",
    "SlownessProfile",
    "Trace",
    "TraceRow",
    "Transient",
    "Uniform",
    "parse_law",
]
