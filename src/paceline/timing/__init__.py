"""How long things take in simulation: laws of computation time, slowdowns, network and server."""

from paceline.timing.laws import (
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
from paceline.timing.network import Network, ServerTime
from paceline.timing.scenario import Slowdown, Timeline, Transient

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
    "ServerTime",
    "ShiftedExponential",
    "Slowdown",
    "Timeline",
    "Transient",
    "Uniform",
    "parse_law",
]
