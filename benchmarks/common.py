"""Shared parts of the benchmarks: options, description of the machine, medians with their spread, result files."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import psutil

RESULTS = Path(__file__).parent / "results"


def options(description: str, *, rounds: int = 5) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"number of alternating rounds (default {rounds})")
    parser.add_argument("--save", action="store_true", help="save the result in benchmarks/results/")
    return parser


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the median of some values with the smallest, the largest and all of them in order."""
    return {
        "median": rounded(median(values)),
        "min": rounded(min(values)),
        "max": rounded(max(values)),
        "rounds": [rounded(value) for value in values],
    }


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, Any]:
    """Return the spread of the ratios taken round by round."""
    return spread([above / below for above, below in zip(numerators, denominators, strict=True)])


class Stopwatch:
    """Sum of the time that a program spends in some methods.

    Attributes:
        calls_s: seconds of each call so far.
    """

    def __init__(self) -> None:
        self.calls_s: list[float] = []

    @property
    def s(self) -> float:
        """Sum of the calls, in seconds."""
        return sum(self.calls_s)

    def time(self, kind: type[Any], name: str, clock: Callable[[], float] = perf_counter) -> None:
        """Add the time of a method of a class from now on."""
        inner = getattr(kind, name)

        def timed(*args: Any, **options: Any) -> Any:
            begun = clock()
            try:
                return inner(*args, **options)
            finally:
                self.calls_s.append(clock() - begun)

        setattr(kind, name, timed)


def timed(work: Callable[[], object], repeats: int = 1) -> float:
    """Return the mean seconds of one call."""
    begun = perf_counter()
    for _ in range(repeats):
        work()
    return (perf_counter() - begun) / repeats


def rounded(value: float) -> float:
    """Round to five significant digits."""
    return float(f"{value:.5g}")


def report(name: str, args: argparse.Namespace, results: Mapping[str, Any], *peers: str) -> None:
    """Print a result as JSON, and save it with `--save`.

    Args:
        name: name of the benchmark.
        args: options, saved as the configuration.
        results: measurements with their bars.
        peers: packages whose versions are saved, in addition to torch.
    """
    config = {option: str(value) if isinstance(value, Path) else value for option, value in vars(args).items()}
    del config["save"]
    text = json.dumps(
        {"benchmark": name, "config": config, "machine": machine(), "versions": versions(*peers), "results": results},
        indent=2,
    )
    print(text)
    if args.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(text + "\n")


def machine() -> dict[str, Any]:
    """Return a description of this machine."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "load_average": [rounded(load) for load in os.getloadavg()],
    }


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python and of installed packages."""
    return {"python": platform.python_version()} | {
        package: _version(package) for package in ("paceline", "torch", "numpy", *packages)
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
