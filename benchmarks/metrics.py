"""Cost of the metrics of a run: time per update, time of a scrape, and memory.

Time: `Prometheus.on_record` for all records of one update (its gradients and the update), as a share of an update of 10
ms, without a server in between, while nothing is scraped. The page is scraped with a thousand workers. Memory: the
resident memory while records arrive.
"""

from __future__ import annotations

import argparse
import gc
import urllib.request
from collections.abc import Sequence
from contextlib import closing
from time import perf_counter

import psutil

import paceline as pl
from common import options, report, rounded, spread
from paceline.core.records import Record
from paceline.recording.callback import Memory
from paceline.recording.history import Totals
from paceline.recording.metrics.network_counters import NetworkCounters

BAR = 0.001
UPDATE_S = 0.01
GROWTH_BAR_MIB = 2.0
UPDATES = 2000


def main() -> None:
    parser = options(__doc__ or "", rounds=7)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--memory-updates", type=int, default=100_000)
    args = parser.parse_args()

    shares = {}
    for n in args.workers:
        records = records_of(n)
        seconds = [seconds_per_update(records) for _ in range(args.rounds)]
        share = spread([each / UPDATE_S for each in seconds])
        shares[n] = {**share, "meets_bar": share["median"] <= BAR}
    memory_mib = resident_memory_mib(records_of(4), args.memory_updates)
    growth_mib = memory_mib[-1] - memory_mib[1]
    report(
        "metrics",
        args,
        {
            "bar": f"at most {BAR:.1%} of an update of 10 ms; memory flat (at most {GROWTH_BAR_MIB} MiB more)",
            "share_by_workers_under_bsp": shares,
            "scrape_of_1000_workers_s": spread(scrape_s(args)),
            "resident_mib_at_each_tenth": [rounded(each) for each in memory_mib],
            "growth_mib": rounded(growth_mib),
            "memory_is_flat": growth_mib <= GROWTH_BAR_MIB,
        },
        "prometheus-client",
    )


def records_of(n: int) -> list[Record]:
    """Return the records of a run of BSP in simulated time."""
    memory = Memory()
    pl.train(
        pl.jobs.digits(),
        protocol=pl.bsp(),
        cluster=pl.Cluster(n, pl.timing.Exponential(mean_s=1.0)),
        stop=pl.Stop(updates=UPDATES if n < 100 else 20),
        callbacks=[memory],
        progress=False,
    )
    return memory.records


def started() -> pl.callbacks.Prometheus:
    """Return the callback after the start of a run."""
    prometheus = pl.callbacks.Prometheus(0)
    prometheus.on_start(pl.callbacks.RunInfo({}, Totals(), NetworkCounters()))
    return prometheus


def seconds_per_update(records: Sequence[Record]) -> float:
    """Return the seconds of the callback for the records of an update."""
    with closing(started()) as prometheus:
        begun = perf_counter()
        for record in records:
            prometheus.on_record(record)
        return (perf_counter() - begun) / sum(type(record) is pl.callbacks.UpdateMade for record in records)


def scrape_s(args: argparse.Namespace) -> list[float]:
    """Return the seconds of each scrape of a run with a thousand workers."""
    seconds = []
    with closing(started()) as prometheus:
        for record in records_of(1000):
            prometheus.on_record(record)
        for _ in range(args.rounds):
            begun = perf_counter()
            urllib.request.urlopen(f"{prometheus.url}/metrics").read()
            seconds.append(perf_counter() - begun)
    return seconds


def resident_memory_mib(records: Sequence[Record], updates: int) -> list[float]:
    """Return the resident memory at each tenth of so many updates, with a scrape at each."""
    found = []
    with closing(started()) as prometheus:
        for _ in range(10):
            for _ in range(updates // UPDATES // 10):
                for record in records:
                    prometheus.on_record(record)
            urllib.request.urlopen(f"{prometheus.url}/metrics").read()
            gc.collect()
            found.append(psutil.Process().memory_info().rss / 2**20)
    return found


if __name__ == "__main__":
    main()
