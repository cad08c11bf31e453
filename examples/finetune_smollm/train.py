"""LoRA of SmolLM2-135M with the Trainer of transformers: under DistributedDataParallel, or with a protocol of paceline.

Start it with torchrun. Only `trainer_of` differs between both.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from data import load_model, load_tokens, sequences
from safetensors.torch import save_file
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

RANK = int(os.environ.get("RANK", "0"))
SEQUENCES, VALIDATION = 60, 24


def options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--protocol", default="", help="protocol of paceline; DistributedDataParallel without it")
    parser.add_argument("--out", type=Path, required=True, help="folder of the adapters that rank 0 saves")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-s", type=float, default=0.0, help="least seconds of a step")
    parser.add_argument("--slow-rank", type=int, default=-1, help="rank whose steps last --slow-factor times as long")
    parser.add_argument("--slow-factor", type=float, default=4.0)
    parser.add_argument("--save-every", type=int, default=3, help="steps of rank 0 between two saved adapters")
    return parser.parse_args()


class Paced:
    """Mixin of a Trainer whose steps last at least a number of seconds, `least_s`: a stand-in for a slower machine."""

    least_s = 0.0
    _compute_s = 0.0

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Wait, and make a step."""
        time.sleep(max(0.0, self.least_s - self._compute_s))
        begun_s = time.process_time()
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self._compute_s = time.process_time() - begun_s
        return loss


class SavedAdapters(TrainerCallback):  # type: ignore[misc]  # no types without the package
    """Adapters at rank 0, saved under the seconds since the first step began."""

    def __init__(self, folder: Path, every: int) -> None:
        self._folder = folder
        self._every = every
        self._begun_s: float | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Start the clock, and save the first adapter."""
        if self._begun_s is None:
            self._begun_s = time.monotonic()
            self._save(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Save an adapter."""
        if state.global_step % self._every == 0:
            self._save(model)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Save the last adapter."""
        self._save(model)

    def _save(self, model: Any) -> None:
        if RANK == 0:
            assert self._begun_s is not None
            adapter = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
            adapter = {name.removeprefix("module."): value.contiguous() for name, value in adapter.items()}  # of DDP
            save_file(adapter, self._folder / f"{time.monotonic() - self._begun_s:09.3f}.safetensors")


def trainer_of(protocol: str, settings: dict[str, Any]) -> tuple[type[Any], Any]:
    """Return the class of the Trainer, and its arguments."""
    if not protocol:
        return Trainer, TrainingArguments(**settings, ddp_backend="gloo")
    from paceline.integrations.transformers import PacelineArguments, PacelineTrainer

    return PacelineTrainer, PacelineArguments(**settings, protocol=protocol)


def main() -> None:
    """Train."""
    given = options()
    given.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    set_seed(given.seed)
    settings = {
        "output_dir": str(given.out),
        "per_device_train_batch_size": 1,
        "num_train_epochs": 1,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "seed": given.seed,
    }
    kind, arguments = trainer_of(given.protocol, settings)
    blocks = sequences(load_tokens(), SEQUENCES + VALIDATION, seed=0)[VALIDATION:]
    data = [{"input_ids": torch.tensor(each), "labels": torch.tensor(each)} for each in blocks]
    trainer = type("PacedTrainer", (Paced, kind), {})(
        model=load_model(), args=arguments, train_dataset=data, callbacks=[SavedAdapters(given.out, given.save_every)]
    )
    trainer.least_s = given.step_s * (given.slow_factor if given.slow_rank == RANK else 1.0)
    trainer.train()


if __name__ == "__main__":
    main()
    os._exit(0)  # the end of a gloo group may wait for processes that have ended
