"""Cluster size, quorums and expected seconds for tests of update times."""

import numpy as np

import paceline as pl
from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import Apply
from paceline.engines.virtual.timing import TimedWorkers
from paceline.protocols.protocol import as_plan
from paceline.theory import expected

P, K = 8, 4
EXPONENTIAL, CONSTANT = pl.timing.Exponential(1.0), pl.timing.Deterministic(1.0)
SHIFTED, PARETO = pl.timing.ShiftedExponential(1.0, 1.0), pl.timing.Pareto(1.0, 3.0)
HYPER = pl.timing.HyperExponential((1.0, 11.0), (0.9, 0.1))


def seconds(protocol, law, n=P):
    return expected(protocol, pl.Cluster(n, law)).seconds_per_update


def z_of(protocol, law, n, gradients=10_000, batches=20):
    """Return theory, mean and standard error of the seconds per update, by batch means after a warm-up."""
    theory = expected(protocol, pl.Cluster(n, law))
    at_s = []
    coordinator = Coordinator(as_plan(protocol), workers=n, stop=pl.Stop(updates=gradients // theory.k))
    with TimedWorkers(pl.Cluster(n, law), seed=0).loop() as loop:
        loop.run(coordinator, lambda now, _, commands: at_s.extend(now for each in commands if type(each) is Apply))
    length = int(0.9 * len(at_s)) // batches
    means = np.diff(at_s[-1 - batches * length :: length]) / length
    return theory, means.mean(), means.std(ddof=1) / batches**0.5
