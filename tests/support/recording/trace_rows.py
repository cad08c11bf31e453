"""Hand-made rows of traces, and runs with them."""

import paceline as pl
from paceline.clusters.timing.trace import TraceRow
from tiny_jobs import tiny_job

CLUSTER = pl.Cluster(
    4,
    pl.timing.ShiftedExponential(0.3, 0.7),
    network=pl.timing.Network(latency_s=0.01, up_bytes_per_s=1e4, down_bytes_per_s=2e4),
    transient=pl.timing.Transient(mean_on_s=3, mean_off_s=5, slowdown=3),
)


def row(worker=0, draw=1, start_s=0.0, total_s=1.0, censored=0):
    return TraceRow(
        worker=worker,
        draw=draw,
        start_s=start_s,
        pull_s=0.0,
        compute_s=total_s,
        push_s=0.0,
        end_s=start_s + total_s,
        censored=censored,
    )


def rows_of(totals_s, worker=0, censored=()):
    """Return consecutive rows; those at the given positions are censored."""
    starts_s = [sum(totals_s[:index]) for index in range(len(totals_s))]
    return [
        row(worker, index + 1, starts_s[index], total_s, int(index in censored))
        for index, total_s in enumerate(totals_s)
    ]


def trained(protocol, cluster, updates=50, **changes):
    return pl.train(tiny_job(), protocol=protocol, cluster=cluster, stop=pl.Stop(updates=updates), seed=5, **changes)


def replayed(trace, *asked, seed=0, **cluster):
    trips = pl.Cluster(trace.workers, trace, **cluster).round_trips(seed)
    return [trips.duration_s(*each) for each in asked]


# -- censored work
CENSORED = pl.timing.Trace(rows_of([1.0, 2.0, 1.0], censored=[1]), source="yesterday")
