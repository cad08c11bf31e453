"""The live page: delay from a record to the page, cost for the run, memory of server and page in a long run.

- `delay`: a process writes updates; a browser notes when the page first shows each of them.
- `cost`: runs of about 100 updates a second on worker processes that sleep, with a page and a viewer (no browser, which
  would need the cores of the run). Both are paused in every second window of two seconds; the rates of neighbouring
  windows are compared. And the processor time of the server.
- `memory`: resident memory of the server and memory of the page's script at each tenth of a long log.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from playwright.sync_api import Page, sync_playwright
from scipy.stats import quantile_test
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline as pl
from common import options, report, rounded, spread
from paceline.core.records import GradientArrived, RunStarted, UpdateMade
from paceline.recording.run_folder import RunFolder
from paceline.recording.schema import SCHEMA
from paceline.utils.confidence_intervals import interval_of_mean
from paceline.watch.address import Address
from paceline.watch.run_page import served_beside

DELAY_BAR_S = 1.0
COST_BAR = 0.005
GROWTH_BAR_MIB = 8.0
LIMIT_MS = 600_000  # for the page to show a tenth of the long log
SLEEP_S = 0.008  # of a worker for each gradient
WINDOW_S = 2.0
FREE = Address(port=0)
CONFIGURATION = {
    "schema": SCHEMA,
    "job": "invented",
    "protocol": "bsp",
    "cluster": "",
    "seed": 0,
    "workers": 64,
    "parameters": 1000,
}
# Adds the time of the first sight of each number of updates to window.seen.
NOTE_UPDATES = """() => {
    window.seen = [];
    const note = () => {
        const count = Number((/: ([\\d]+) updates? in/.exec(document.getElementById("headline").textContent) ?? [])[1]);
        if (count && count !== window.seen.at(-1)?.[0]) window.seen.push([count, Date.now() / 1000]);
    };
    new MutationObserver(note).observe(document.getElementById("headline"), { childList: true });
}"""
VIEWER = "import sys, urllib.request as r; [None for line in r.urlopen(sys.argv[1].rstrip('/') + '/events')]"


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of a run of delay and cost")
    parser.add_argument("--updates", type=int, default=100_000, help="updates of the long log")
    parser.add_argument("--workers", type=int, default=64, help="workers of the long log")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    name = "watch" if args.parts == list(PARTS) else "_".join(["watch", *args.parts])
    report(name, args, {part: PARTS[part](args) for part in args.parts})


def delay(args: argparse.Namespace) -> dict[str, Any]:
    medians_s, longest_s = [], []
    for _ in range(args.rounds):
        with (
            tempfile.TemporaryDirectory() as folder,
            served_beside(Path(folder) / "run", FREE) as url,
            opened(url) as page,
        ):
            page.evaluate(NOTE_UPDATES)
            written_s = write_slowly(Path(folder) / "run", args.seconds)
            page.wait_for_timeout(2 * 1000 * DELAY_BAR_S)
            delays_s = list(delays(written_s, page.evaluate("window.seen")))
            medians_s.append(median(delays_s))
            longest_s.append(max(delays_s))
    longest = spread(longest_s)
    return {
        "bar": f"every update within {DELAY_BAR_S} s",
        "median_s": spread(medians_s),
        "longest_s": {**longest, "meets_bar": longest["max"] <= DELAY_BAR_S},
    }


def write_slowly(folder: Path, seconds: float) -> list[float]:
    """Write ten updates a second and return the time at which each was written."""
    writer, written_s = RunFolder(folder, {**CONFIGURATION, "workers": 4}), []
    writer.on_record(RunStarted(0.0, 4, ""))
    for version in range(1, int(10 * seconds) + 1):
        time.sleep(0.1)
        for record in update_of(version, 4):
            writer.on_record(record)
        written_s.append(time.time())
    writer.close()
    return written_s


def delays(written_s: list[float], seen: list[tuple[int, float]]) -> Iterator[float]:
    """Yield the time from the writing of each update to the first sight of it or a later one."""
    for version, at_s in enumerate(written_s, start=1):
        yield min(seen_s for count, seen_s in seen if count >= version) - at_s


def cost(args: argparse.Namespace) -> dict[str, Any]:
    slowdowns, shares = [], []
    all_pairs: list[float] = []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder, served_beside(Path(folder) / "run", FREE) as url:
            viewer = subprocess.Popen([sys.executable, "-c", VIEWER, url], stderr=subprocess.DEVNULL)
            page = [server_process(), psutil.Process(viewer.pid)]
            before_s = processor_s(page[0])
            with paused_in_turn(page) as windows:
                made_s = update_times(Path(folder) / "run", args.seconds)
            shares.append((processor_s(page[0]) - before_s) / (made_s[-1] - made_s[0]))
            viewer.kill()
            viewer.wait()
        pairs = [float(1 - shown / alone) for alone, shown in rates_by_turn(np.array(made_s), windows)]
        slowdowns.append(float(np.mean(pairs)))
        all_pairs += pairs
    interval = interval_of_mean(all_pairs)
    assert interval is not None
    middle = quantile_test(all_pairs, p=0.5).confidence_interval()
    return {
        "bar": f"at most {COST_BAR:.1%} of the run's rate",
        "lost_share_of_the_rate": spread(slowdowns),
        "interval_95": [rounded(interval.low), rounded(interval.high)],
        "meets_bar": interval.high <= COST_BAR,
        "median_of_pairs": {"median": rounded(median(all_pairs)), "interval_95": [*map(rounded, middle)]},
        "pairs_of_windows": len(all_pairs),
        "processor_share_of_the_server": spread(shares),
    }


@contextmanager
def paused_in_turn(processes: Sequence[psutil.Process]) -> Iterator[list[float]]:
    """Pause processes in every second window until the end of the block.

    The value is the list of the ends of the windows, which grows. They run in the first window, and catch up in each
    window with what they have missed, so that their cost is not underestimated.
    """
    ends_s: list[float] = []
    has_ended = Event()

    def switch() -> None:
        while not has_ended.wait(WINDOW_S):
            for process in processes:
                process.suspend() if len(ends_s) % 2 == 0 else process.resume()
            ends_s.append(time.monotonic())

    thread = Thread(target=switch)
    thread.start()
    try:
        yield ends_s
    finally:
        has_ended.set()
        thread.join()
        for process in processes:
            process.resume()


def rates_by_turn(made_s: NDArray[np.float64], ends_s: Sequence[float]) -> Iterator[tuple[float, float]]:
    """Yield the updates per second of each window without the page, and of the next one with it, of whole windows."""
    first = int(np.searchsorted(ends_s, made_s[0]))  # the run begins later than the windows
    windows = [made_s[(made_s > begin) & (made_s <= end)] for begin, end in pairwise(ends_s[first:])]
    rates = [(len(window) - 1) / (window[-1] - window[0]) for window in windows if len(window) > 1]
    if first % 2:  # the first whole window has the page
        rates = rates[1:]
    yield from zip(rates[::2], rates[1::2], strict=False)


class UpdateTimes(pl.callbacks.Callback):
    """Times of the updates of a run."""

    def __init__(self) -> None:
        self.made_s: list[float] = []

    def on_update(self, update: UpdateMade) -> None:
        self.made_s.append(time.monotonic())


def update_times(folder: Path, seconds: float) -> list[float]:
    """Return the times of the updates of a run on two worker processes that sleep."""
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 4, generator=generator), torch.randint(2, (64,), generator=generator))
    job = pl.Job(
        model=partial(nn.Linear, 4, 2),
        loss=F.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.01),
        data=data,
        batch_size=2,
    )
    cluster = pl.LocalCluster(2, slowness=pl.Cluster(2, pl.timing.Deterministic(SLEEP_S)))
    times, stop = UpdateTimes(), pl.Stop(seconds=seconds)
    pl.train(job, protocol="bsp", cluster=cluster, stop=stop, out=folder, seed=0, progress=False, callbacks=[times])
    return times.made_s


def server_process() -> psutil.Process:
    """Return the child process that serves the page."""
    [server] = [child for child in psutil.Process().children() if "paceline.watch.run_page" in child.cmdline()]
    return server


def processor_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def memory(args: argparse.Namespace) -> dict[str, Any]:
    server_mib, page_mib = [], []
    with tempfile.TemporaryDirectory() as folder, served_beside(Path(folder) / "run", FREE) as url, opened(url) as page:
        server = server_process()
        tools = page.context.new_cdp_session(page)
        writer = RunFolder(Path(folder) / "run", {**CONFIGURATION, "workers": args.workers})
        writer.on_record(RunStarted(0.0, args.workers, ""))
        for version in range(1, args.updates + 1):
            for record in update_of(version, args.workers):
                writer.on_record(record)
            if version % (args.updates // 10) == 0:
                page.locator("h1", has_text=f": {version} updates in").wait_for(timeout=LIMIT_MS)
                tools.send("HeapProfiler.collectGarbage")
                page_mib.append(page.evaluate("performance.memory.usedJSHeapSize") / 2**20)
                server_mib.append(server.memory_info().rss / 2**20)
        writer.close()
    growth_mib = {"server": server_mib[-1] - server_mib[0], "page": page_mib[-1] - page_mib[0]}
    return {
        "bar": f"at most {GROWTH_BAR_MIB} MiB more at the end than after the first tenth",
        "server_mib": [rounded(each) for each in server_mib],
        "page_mib": [rounded(each) for each in page_mib],
        "growth_mib": {name: rounded(each) for name, each in growth_mib.items()},
        "memory_is_flat": max(growth_mib.values()) <= GROWTH_BAR_MIB,
    }


def update_of(version: int, workers: int) -> Iterator[GradientArrived | UpdateMade]:
    """Yield the records of an update of one gradient from each worker, which takes a second."""
    now_s = float(version)
    for worker in range(workers):
        yield GradientArrived(
            now_s=now_s,
            worker=worker,
            draw=version,
            version=version - 1,
            started_s=now_s - 1,
            staleness=0,
            used=True,
            reason="",
            loss=1 / version,
            samples=8,
            squared_norm=1.0,
            pull_s=0.01,
            compute_s=0.9 + worker / 1000,
            push_s=0.01,
        )
    yield UpdateMade(
        now_s=now_s,
        version=version,
        k=workers,
        workload=version * workers,
        samples=8 * workers,
        loss=1 / version,
        learning_rate=0.1,
        staleness=0.0,
        max_staleness=0,
        reason="all gradients are in",
        busy_s=0.9 * version * workers,
        live_s=float(version * workers),
    )


@contextmanager
def opened(url: str) -> Iterator[Page]:
    """Open a page in a browser."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--enable-precise-memory-info"]
        )
        page = browser.new_page()
        page.goto(url)
        yield page
        browser.close()


PARTS: Mapping[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"delay": delay, "cost": cost, "memory": memory}

if __name__ == "__main__":
    main()
