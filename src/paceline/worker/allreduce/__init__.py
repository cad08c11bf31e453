"""All-reduce algorithms of a worker: what it sums with the others, and where it continues from."""

from __future__ import annotations

from paceline.protocols.allreduce import AllReduceConfig
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.flat_buffers import FlatLayout
from paceline.worker.allreduce.base import AllReduceAlgorithm
from paceline.worker.allreduce.gradient_averaging import GradientAveraging
from paceline.worker.allreduce.update_averaging import UpdateAveraging


def make_algorithm(allreduce: AllReduceConfig, server: ParameterServer, layout: FlatLayout) -> AllReduceAlgorithm:
    """Return the algorithm of an all-reduce configuration."""
    if allreduce.sums == "gradients":
        return GradientAveraging(server, layout)
    return UpdateAveraging(server, layout, allreduce)
