"""Timing models of simulated clusters: compute-time distributions, slowdowns, network, server and traces."""

from paceline.clusters.timing.distributions import (
    DISTRIBUTIONS,
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
    parse_distribution,
)
from paceline.clusters.timing.network import Network, ServerTime
from paceline.clusters.timing.slowdowns import Periodic, Slowdown, SlownessProfile, Transient
from paceline.clusters.timing.trace import Trace, TraceRow

__all__ = [
    "DISTRIBUTIONS",
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
    "parse_distribution",
]
