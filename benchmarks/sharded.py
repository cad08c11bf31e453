"""Attached loops of models that `fully_shard` has sharded, groups of two ranks as workers, against HSDP of torch.

- `premium`: time of an update under BSP, two groups at one speed.
- `straggler`: three groups, one of them at half speed: updates in a second.
- `memory`: peak of a rank beyond that under HSDP, in bytes of its shard of the parameters.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from common import options, ratios, report, spread
from distributed_ranks import ANSWER

RANKS = Path(__file__).with_name("sharded_ranks.py")
GROUP, LIMIT_S = 2, 300
PREMIUM_BAR, MEMORY_BAR = 1.05, 2.0
STRAGGLER_BARS = {"k_sync(k=2)": 1.8, "balanced(m=12)": 1.4}
LARGE, FEW = 150_000_000, 6  # parameters and updates of the memory: shards of 36 MiB, which glibc gives back when freed


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--parameters", type=int, default=11_700_000)
    parser.add_argument("--compute-s", type=float, default=0.4)
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    args = parser.parse_args()
    name = "_".join(["sharded", *(args.parts if args.parts != list(PARTS) else [])])
    report(name, args, {part: PARTS[part](args) for part in args.parts})


def premium(args: argparse.Namespace) -> dict[str, Any]:
    pairs = [[update_s(args, each, groups=2) for each in ("bsp", "")] for _ in range(args.rounds)]
    ours_s, hsdp_s = zip(*pairs, strict=True)
    ratio = ratios(ours_s, hsdp_s)
    return {
        "bar": f"at most {PREMIUM_BAR} x HSDP's time of an update",
        "ours_s": spread(ours_s),
        "hsdp_s": spread(hsdp_s),
        "ratio": ratio,
        "meets_bar": ratio["median"] <= PREMIUM_BAR,
    }


def straggler(args: argparse.Namespace) -> dict[str, Any]:
    measured: dict[str, list[float]] = {"": [], **{protocol: [] for protocol in STRAGGLER_BARS}}
    for _ in range(args.rounds):
        for protocol, rounds in measured.items():
            rounds.append(1 / update_s(args, protocol, groups=3, slow=2.0))
    results = {}
    for protocol, bar in STRAGGLER_BARS.items():
        ratio = ratios(measured[protocol], measured[""])
        results[protocol] = {
            "bar": f"at least {bar} x HSDP's updates per second",
            "ours_per_s": spread(measured[protocol]),
            "hsdp_per_s": spread(measured[""]),
            "ratio": ratio,
            "meets_bar": ratio["median"] >= bar,
        }
    return results


def memory(args: argparse.Namespace) -> dict[str, Any]:
    large = argparse.Namespace(**{**vars(args), "parameters": LARGE, "updates": FEW, "compute_s": 0.0})
    more = []
    for _ in range(args.rounds):
        ours, hsdp = ([*answers(large, protocol, groups=2)] for protocol in ("bsp", ""))
        shard = hsdp[0]["shard_bytes"]
        more.append((mean(each["peak_bytes"] for each in ours) - mean(each["peak_bytes"] for each in hsdp)) / shard)
    found = spread(more)
    return {
        "bar": f"at most {MEMORY_BAR} x the bytes of the shard",
        "more": found,
        "meets_bar": found["median"] <= MEMORY_BAR,
    }


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "premium": premium,
    "straggler": straggler,
    "memory": memory,
}


def update_s(args: argparse.Namespace, protocol: str, *, groups: int, slow: float = 1.0) -> float:
    """Return the seconds of an update, as the first rank sees them."""
    first = answers(args, protocol, groups=groups, slow=slow)[0]
    seconds: float = first["seconds"] / first["updates"]
    return seconds


def answers(args: argparse.Namespace, protocol: str, *, groups: int, slow: float = 1.0) -> list[dict[str, Any]]:
    settings = {"protocol": protocol, "slow": slow, "compute_s": args.compute_s, "parameters": args.parameters}
    settings["updates"] = args.updates
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(groups * GROUP)]
    done = subprocess.run(
        [*command, str(RANKS), json.dumps(settings)], capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    lines = [line.partition(ANSWER)[2] for line in done.stdout.replace(ANSWER, "\n" + ANSWER).splitlines()]
    found = sorted((json.loads(line) for line in lines if line), key=lambda answer: int(answer["rank"]))
    assert len(found) == groups * GROUP, done.stdout + done.stderr
    return found


if __name__ == "__main__":
    main()
