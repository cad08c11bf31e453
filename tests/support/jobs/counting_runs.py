"""Runs of the counting job on worker processes that are killed and restarted."""

from random import Random

import paceline as pl
from tiny_counting import BATCH, counting_job

N = 4  # workers
SAMPLES = 4 * BATCH * 5  # 20 minibatches per epoch, 5 per worker


def deaths(seed, back_after_s=None):
    """Return faults at random draws, one or two per worker."""
    random = Random(seed)
    draws = {worker: random.sample(range(1, 10), random.choice([1, 2])) for worker in range(N)}
    return [pl.Fault(worker=worker, draw=draw, back_after_s=back_after_s) for worker in draws for draw in draws[worker]]


def on_processes(protocol, seed, **options):
    slowness = pl.Cluster(N, timing=pl.timing.Exponential(0.004))
    cluster = pl.LocalCluster(N, slowness=slowness, respawn=True, faults=deaths(seed))
    return pl.train(counting_job(SAMPLES), protocol=protocol, cluster=cluster, seed=seed, **options)
