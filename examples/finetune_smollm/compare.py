"""Time to a validation loss of the fine-tuning in `train.py`, where one of three ranks is four times slower.

Contenders: DDP; DDP without the slow rank; protocols of paceline. All of them train on the same samples with the same
learning rate. The runs of a seed follow each other, and each is compared with DDP of the same seed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DDP, WITHOUT_SLOW = "DDP", "DDP without the slow rank"
PROTOCOLS = ("k_sync(k=2)", "k_batch_async(k=3)")
TOLERANCE = 0.02  # on the final loss of DDP, which is the target

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
            result = {"seed": seed, "final_loss": curve[-1][1], "target": target, "curve": curve}
            result |= {"total_s": curve[-1][0], "to_target_s": time_to(curve, target)}
            found.setdefault(contender, []).append(result)
            print(contender, {name: value for name, value in result.items() if name != "curve"}, flush=True)
    about = {"date": date.today().isoformat(), "cores": os.cpu_count(), "machine": platform.machine()}
    args.out.write_text(json.dumps({**about, "step_s": args.step_s, "contenders": found}, indent=1) + "\n")
    print(table(found))


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
