"""Time to a validation loss of the fine-tuning in `train.py`, where one of three ranks is four times slower.

Contenders: DDP; DDP without the slow rank; protocols of paceline. All of them train on the same samples with the same
learning rate. The runs of a seed follow each other, and each is compared with DDP of the same seed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
from datetime import date
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DDP, WITHOUT_SLOW = "DDP", "DDP without the slow rank"
PROTOCOLS = ("k_sync(k=2)", "k_batch_async(k=3)")
TOLERANCE = 0.02  # on the final loss of DDP, which is the target
LOSS_DIGITS = 5  # of the curves in the file; the times to the target are of the unrounded losses
PACKAGES = ("torch", "transformers", "peft")

Curve = list[tuple[float, float]]  # seconds of training, validation loss


def time_to(curve: Curve, target: float) -> float | None:
    """Return when a curve reaches a loss, between two points by interpolation; None if it does not.

    >>> time_to([(0.0, 3.0), (10.0, 2.0), (20.0, 1.0)], 1.5)
    15.0
    >>> time_to([(0.0, 3.0)], 1.5)
    """
    for (before_s, higher), (at_s, loss) in pairwise(curve):
        if loss <= target:
            return before_s + (at_s - before_s) * (higher - target) / (higher - loss)
    return None


def train(contender: str, seed: int, step_s: float, out: Path) -> None:
    """Run one contender, unless its adapters are there already."""
    if out.exists():
        return
    unfinished = out.with_name(f"{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    ranks = 2 if contender == WITHOUT_SLOW else 3
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(HERE / "train.py"), "--out", str(unfinished), "--seed", str(seed), "--step-s", str(step_s)]
    command += ["--slow-rank", "2"]
    if contender in PROTOCOLS:
        command += ["--protocol", contender]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    unfinished.rename(out)


def evaluate(out: Path, model: Any, blocks: Any) -> Curve:
    """Return the validation loss of each saved adapter."""
    import torch
    from safetensors.torch import load_file

    curve = []
    model.eval()
    for file in sorted(out.glob("*.safetensors")):
        adapter = load_file(file)
        unknown = model.load_state_dict(adapter, strict=False).unexpected_keys
        assert not unknown, unknown
        with torch.no_grad():
            losses = [model(input_ids=part, labels=part).loss.item() for part in blocks.split(4)]
        curve.append((float(file.stem), statistics.fmean(losses)))
    return curve


def main() -> None:
    """Train, evaluate, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--step-s", type=float, default=2.0, help="seconds of a step of a fast rank")
    parser.add_argument("--folder", type=Path, default=Path("runs/finetune_smollm"), help="adapters; kept for a resume")
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    args = parser.parse_args()
    import torch
    from data import load_model, load_tokens, prepare, sequences
    from train import SEQUENCES, VALIDATION

    facts = about()
    prepare()
    model = load_model()
    blocks = torch.tensor(sequences(load_tokens(), SEQUENCES + VALIDATION, seed=0)[:VALIDATION])
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in range(args.seeds):
        target = 0.0
        for contender in (DDP, WITHOUT_SLOW, *PROTOCOLS):
            folder = args.folder / f"{seed}" / contender.replace(" ", "-")
            train(contender, seed, args.step_s, folder)
            curve = evaluate(folder, model, blocks)
            if contender == DDP:
                target = curve[-1][1] + TOLERANCE
            points = [(at_s, round(loss, LOSS_DIGITS)) for at_s, loss in curve]
            result = {"seed": seed, "final_loss": curve[-1][1], "target": target, "curve": points}
            result |= {"total_s": curve[-1][0], "to_target_s": time_to(curve, target)}
            found.setdefault(contender, []).append(result)
            print(contender, {name: value for name, value in result.items() if name != "curve"}, flush=True)
    args.out.write_text(as_text({**facts, "step_s": args.step_s, "contenders": found}))
    print(table(found))


def about() -> dict[str, Any]:
    """Return the commit, the versions of the packages, and a description of this machine."""
    command = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    versions = {package: version(package) for package in PACKAGES}
    machine = {"cpu": cpu(), "cores": os.cpu_count(), "machine": platform.machine()}
    return {"commit": commit, "date": date.today().isoformat(), **versions, **machine}


def cpu() -> str:
    """Return the name of the processor."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def as_text(results: dict[str, Any]) -> str:
    """Return results as JSON, with each point of a curve on a line.

    >>> print(as_text({"curve": [(0.0, 3.5), (10.0, 2.5)]}), end="")
    {
     "curve": [
      [0.0, 3.5],
      [10.0, 2.5]
     ]
    }
    """
    return re.sub(r"\[\s+([-+.\w]+),\s+([-+.\w]+)\s+\]", r"[\1, \2]", json.dumps(results, indent=1)) + "\n"


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Return the results as a table: medians over the seeds, and the range of the ratios to DDP."""
    lines = ["| contender | s to the target | times as fast as DDP | final loss |", "| --- | --- | --- | --- |"]
    for contender, results in found.items():
        times_s = [each["to_target_s"] for each in results]
        final = statistics.median(each["final_loss"] for each in results)
        if None in times_s:
            lines.append(f"| {contender} | {times_s.count(None)} of {len(times_s)} did not reach it | | {final:.3f} |")
            continue
        ratios = [ddp["to_target_s"] / own_s for ddp, own_s in zip(found[DDP], times_s, strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(f"| {contender} | {statistics.median(times_s):.0f} | {spread} | {final:.3f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
