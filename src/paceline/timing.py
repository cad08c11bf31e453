"""Times of simulated clusters: distributions, slowdowns, networks, traces."""

from paceline.clusters.timing.distributions import (
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
)
from paceline.clusters.timing.lease_time import LeaseTime
from paceline.clusters.timing.network import Network, ServerTime
from paceline.clusters.timing.slowdowns import Periodic, Slowdown, Transient
from paceline.clusters.timing.trace import Trace

__all__ = [
    "Deterministic",
    "Distribution",
    "Empirical",
    "Exponential",
    "Gamma",
    "HyperExponential",
    "LeaseTime",
    "LogNormal",
    "Network",
    "Pareto",
    "Periodic",
    "ServerTime",
    "ShiftedExponential",
    "Slowdown",
    "Trace",
    "Transient",
    "Uniform",
]
