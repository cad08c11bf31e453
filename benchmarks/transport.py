"""Connections of paceline against the gloo groups of two that they replace, every process a fresh one on loopback.

- `round_trip`: a message with 1 KB, answered by another one, with and without TLS.
- `push`: 4 MB and 47 MB to one worker, which answers shortly.
- `workers`: 4 MB and 47 MB to each of four workers, and as much back from each.
- `processor`: processor seconds of both sides per GB, with and without TLS.
- `rounding`: the same with bf16 on the wire, with its conversions, per GB of float32 that is not sent.
- `training`: four workers with 4 MB that sleep 100 ms for each gradient, BSP, with TLS against without it.
- `interrupt`: a `CancelTask`, and its answer, while 47 MB move over a link of 100 Mbit/s between two network namespaces
  the same way and the other way, against an idle link. Needs root.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
from torch import nn

from common import options, ratios, report, spread
from distributed import Job, free_port, rate
from namespaces import DEVICE, hosts
from paceline.engines.distributed.transport.wire_format import WireFormat
from paceline.tensors.flat_buffers import FlatLayout

RANKS = Path(__file__).with_name("transport_ranks.py")
LOOPBACK = "127.0.0.1"
SMALL, MIDDLE, LARGE = 1_000, 4_000_000, 46_800_000  # bytes
DRAWS = {SMALL: 2000, MIDDLE: 100, LARGE // 2: 30, LARGE: 15}
SIZES = {"4 MB": MIDDLE, "47 MB": LARGE}
ROUND_TRIP_BARS = {"plain": (0.15, 0.10), "tls": (0.25, 0.15)}  # wall time, processor time
PUSH_BARS = {"4 MB": 0.6, "47 MB": 1.0}
WORKERS, WORKERS_BAR = 4, 1.0
PROCESSOR_BARS = {"plain": 0.4, "tls": 1.6}  # seconds per GB
ROUNDING_BAR = 0.2  # seconds per GB, more than float32's
TRAINING_BAR = 1.05
LINK = ["rate", "100mbit", "burst", "64kb", "latency", "20ms"]
INTERRUPT_BAR_S = 0.05


def main() -> None:
    parser = options(__doc__ or "", rounds=10)
    parser.add_argument("--updates", type=int, default=40, help="of each training")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    args = parser.parse_args()
    name = "transport" if args.parts == list(PARTS) else "_".join(["transport", *args.parts])
    report(name, args, {part: PARTS[part](args) for part in args.parts})


# --- the parts -------------------------------------------------------------------------------------------------------


def round_trip(args: argparse.Namespace) -> dict[str, Any]:
    measured = alternate(args.rounds, ["gloo", "plain", "tls"], SMALL, both_ways=True)
    results = {}
    for kind, (wall_bar, cpu_bar) in ROUND_TRIP_BARS.items():
        results[kind] = {
            "wall": against_gloo(measured, kind, "wall_s", wall_bar),
            "processor": against_gloo(measured, kind, "cpu_s", cpu_bar),
        }
    return results


def push(args: argparse.Namespace) -> dict[str, Any]:
    results = {}
    for name, nbytes in SIZES.items():
        measured = alternate(args.rounds, ["gloo", "plain"], nbytes)
        results[name] = against_gloo(measured, "plain", "wall_s", PUSH_BARS[name])
    return results


def workers(args: argparse.Namespace) -> dict[str, Any]:
    results = {}
    for name, nbytes in SIZES.items():
        measured = alternate(args.rounds, ["gloo", "plain"], nbytes, workers=WORKERS, both_ways=True)
        results[name] = against_gloo(measured, "plain", "wall_s", WORKERS_BAR)
    return results


def processor(args: argparse.Namespace) -> dict[str, Any]:
    measured = alternate(args.rounds, ["gloo", "plain", "tls"], LARGE, both_ways=True)
    results: dict[str, Any] = {}
    for kind, rounds in measured.items():
        per_gb = spread([each["cpu_s"] / (2 * LARGE / 1e9) for each in rounds])
        results[kind] = {"s_per_gb": per_gb, "wall_s": spread([each["wall_s"] for each in rounds])}
        if kind in PROCESSOR_BARS:
            bar = PROCESSOR_BARS[kind]
            results[kind] |= {"bar": f"at most {bar} s per GB", "meets_bar": per_gb["median"] <= bar}
    return results


def rounding(args: argparse.Namespace) -> dict[str, Any]:
    conversions = [conversion_s() for _ in range(args.rounds + 1)][1:]
    measured = {nbytes: alternate(args.rounds, ["plain"], nbytes, both_ways=True) for nbytes in (LARGE, LARGE // 2)}
    moves = {
        nbytes: [each["cpu_s"] / (2 * LARGE / 1e9) for each in kinds["plain"]] for nbytes, kinds in measured.items()
    }
    converted = [each / (LARGE / 1e9) for each in conversions]
    bf16 = [move + conversion for move, conversion in zip(moves[LARGE // 2], converted, strict=True)]
    more = spread([ours - theirs for ours, theirs in zip(bf16, moves[LARGE], strict=True)])
    return {
        "bar": f"at most {ROUNDING_BAR} s per GB more than float32",
        "float32_s_per_gb": spread(moves[LARGE]),
        "bf16_s_per_gb": spread(bf16),
        "conversion_s_per_gb": spread(converted),
        "more_s_per_gb": more,
        "meets_bar": more["median"] <= ROUNDING_BAR,
    }


def conversion_s(repeats: int = 5) -> float:
    """Return the processor seconds of rounding a vector to bf16 and back."""
    torch.set_num_threads(1)
    layout = FlatLayout(nn.Linear(LARGE // 4 - 1, 1))
    vectors, wire = layout.allocate(), WireFormat("bf16", layout)
    vectors.flat_parameters[0].normal_()
    memory = wire.allocate(vectors)
    begun = process_time()
    for _ in range(repeats):
        wire.pack(vectors, memory)
        wire.unpack(memory, vectors)
    return (process_time() - begun) / repeats


def training(args: argparse.Namespace) -> dict[str, Any]:
    measured: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(args.rounds):
        for encrypts in measured:
            settings = {
                "protocol": "bsp",
                "compute_s": [0.1] * WORKERS,
                "updates": args.updates,
                "faults": [],
                "encrypt": encrypts,
            }
            ours = Job("train_ours", WORKERS + 1, settings).answers()[0]
            measured[encrypts].append(WORKERS / rate(ours["updates"]))
    ratio = ratios(measured[True], measured[False])
    return {
        "bar": f"at most {TRAINING_BAR} x the time per update without encryption",
        "tls_s": spread(measured[True]),
        "plain_s": spread(measured[False]),
        "ratio": ratio,
        "meets_bar": ratio["median"] <= TRAINING_BAR,
    }


def interrupt(args: argparse.Namespace) -> dict[str, Any]:
    results = {}
    with hosts(2) as made:
        for name in made.names:
            shaping = ["tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", "tbf", *LINK]
            subprocess.run(shaping, check=True, capture_output=True)
        addresses = [made.address(0), made.address(1)]
        for kind in ("plain", "tls"):
            rounds = []
            for _ in range(args.rounds):
                settings = link_settings(kind, LARGE, addresses)
                rounds.append(Job("interrupt", 2, settings, made.names, addresses[0], RANKS).answers()[0])
            idle_s = median([each for found in rounds for each in found["idle"]])
            results[kind] = {"idle_s": idle_s}
            for way in ("same_way", "other_way"):
                trips = [[each - idle_s for each in found[way]] for found in rounds]
                worst = spread([max(each) for each in trips])
                results[kind][way] = {
                    "more_than_idle_s": spread([median(each) for each in trips]),
                    "worst_of_each_round_s": worst,
                    "bar": f"at most {INTERRUPT_BAR_S} s more than on an idle link, the worst of each round",
                    "meets_bar": worst["median"] <= INTERRUPT_BAR_S,
                }
    return results


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "round_trip": round_trip,
    "push": push,
    "workers": workers,
    "processor": processor,
    "rounding": rounding,
    "training": training,
    "interrupt": interrupt,
}


# --- processes -------------------------------------------------------------------------------------------------------


def alternate(
    rounds: int, kinds: list[str], nbytes: int, *, workers: int = 1, both_ways: bool = False
) -> dict[str, list[dict[str, float]]]:
    """Return, for each kind, the wall time and the processor time of all processes of a round trip, in each round."""
    measured: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    draws = max(5, DRAWS[nbytes] // workers)
    for _ in range(rounds):
        for kind in kinds:
            settings = {"draws": draws, "warm_up": max(2, draws // 10), "both_ways": both_ways}
            settings |= link_settings(kind, nbytes, [LOOPBACK] * (workers + 1))
            server, *others = Job("move", workers + 1, settings, script=RANKS).answers()
            cpu_s = server["cpu_s"] + sum(each["cpu_s"] for each in others)
            measured[kind].append({"wall_s": server["wall_s"], "cpu_s": cpu_s})
    return measured


def link_settings(kind: str, nbytes: int, hosts: list[str]) -> dict[str, Any]:
    return {"kind": kind, "nbytes": nbytes, "server": [hosts[0], free_port()], "hosts": hosts}


def against_gloo(measured: dict[str, list[dict[str, float]]], kind: str, what: str, bar: float) -> dict[str, Any]:
    ours, gloo = ([each[what] for each in measured[name]] for name in (kind, "gloo"))
    ratio = ratios(ours, gloo)
    return {
        "bar": f"at most {bar} x gloo's",
        "ours_s": spread(ours),
        "gloo_s": spread(gloo),
        "ratio": ratio,
        "meets_bar": ratio["median"] <= bar,
    }


if __name__ == "__main__":
    main()
