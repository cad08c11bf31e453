"""Report of a long run of many workers: seconds to write it, its size, and seconds to its first paint.

The run is simulated without gradients and recorded as any run: BSP, with exponential times. The time to the first paint
is measured in a headless Chromium, which must be installed.
"""

from __future__ import annotations

import shutil
from math import exp
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import paceline as pl
from common import options, report, spread
from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import Arrival
from paceline.engines.loop import RunLoop
from paceline.engines.virtual.times_only import TimesOnly
from paceline.engines.virtual.timing import TimedWorkers
from paceline.protocols.plan_checks import checked_plan
from paceline.protocols.protocol import as_plan
from paceline.recording.recorder import Recorder
from paceline.recording.run_folder import RunFolder
from paceline.recording.schema import SCHEMA
from paceline.report import write_report

WRITE_BAR_S, SIZE_BAR_MB, PAINT_BAR_S = 15.0, 10.0, 2.0
BATCH_SIZE = 32
READY = "html[data-shown]"
FIRST_PAINT_MS = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--updates", type=int, default=10_000)
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        write_run(run, args.workers, args.updates)
        write_s, paint_s, ready_s = [], [], []
        for _ in range(args.rounds):
            begun = perf_counter()
            page = write_report([run])
            write_s.append(perf_counter() - begun)
            painted, ready = open_page(page)
            paint_s.append(painted)
            ready_s.append(ready)
        size_mb = page.stat().st_size / 1e6
    written, painted_s = spread(write_s), spread(paint_s)
    report(
        "report",
        args,
        {
            "bar": f"at most {WRITE_BAR_S} s to write, {SIZE_BAR_MB} MB, {PAINT_BAR_S} s to the first paint; medians",
            "pieces_of_work": args.workers * args.updates,
            "write_s": {**written, "meets_bar": written["median"] <= WRITE_BAR_S},
            "size_mb": {"size": round(size_mb, 3), "meets_bar": size_mb <= SIZE_BAR_MB},
            "first_paint_s": {**painted_s, "meets_bar": painted_s["median"] <= PAINT_BAR_S},
            "all_charts_drawn_s": spread(ready_s),
        },
        "orjson",
        "playwright",
    )


class Measured(TimesOnly):
    """Parameters of a simulation of times, with compute times and losses as if gradients were computed."""

    def __init__(self, workers: TimedWorkers) -> None:
        self._timed = workers

    def arrived(self, arrival: Arrival, coordinator: Coordinator) -> Arrival:
        """Return the arrival with a compute time and a loss."""
        worker, draw = arrival.worker, arrival.draw
        compute_s = arrival.now - self._timed.started_s(worker)
        loss = 2.3 * exp(-draw / 3000) + 0.003 * ((7 * draw + 13 * worker) % 17)
        measured = arrival.measured._replace(compute_s=compute_s, loss=loss, samples=BATCH_SIZE)
        return arrival._replace(measured=measured)


def write_run(path: Path, workers: int, updates: int) -> None:
    """Simulate BSP and record the run."""
    cluster = pl.Cluster(workers, pl.timing.Exponential(mean_s=1.0))
    plan = checked_plan(as_plan(pl.bsp()), workers, total=None, per_epoch=None)
    coordinator = Coordinator(plan, workers=workers, stop=pl.Stop(updates=updates))
    configuration = {
        "schema": SCHEMA,
        "job": "timing alone",
        "protocol": str(plan),
        "seed": 0,
        "workers": workers,
    }
    folder = RunFolder(path, configuration)
    recorder = Recorder(workers, BATCH_SIZE, "", lambda: 0.1, [folder])
    timed = TimedWorkers(cluster, seed=0)
    with RunLoop(timed, Measured(timed), timed) as loop:
        end = loop.run(coordinator, recorder.observe)
    recorder.end(end, coordinator.version, {})
    folder.close()


def open_page(page: Path) -> tuple[float, float]:
    """Open a page in a new browser, and return the seconds to the first paint and to the end."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page()
        begun = perf_counter()
        tab.goto(page.as_uri())
        tab.wait_for_selector(READY, state="attached")
        ready_s = perf_counter() - begun
        paint_s = float(tab.evaluate(FIRST_PAINT_MS)) / 1000
        browser.close()
    return paint_s, ready_s


if __name__ == "__main__":
    main()
