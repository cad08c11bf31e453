"""Character-level GPT of about a million parameters, on the documentation of Python that is part of Python."""

from __future__ import annotations

import pydoc_data.topics
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.jobs.job import Batch, Metrics
from papers.probe import One

CONTEXT = 64  # characters
WIDTH, HEADS, LAYERS = 144, 4, 4
VALIDATION = 0.1  # share of the text, its end
VALIDATION_SAMPLES = 64


class Block(nn.Module):
    """Transformer block: causal attention and a feed-forward network, each with layer norm before it.

    Args:
        width: size of the embedding.
        heads: number of attention heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output ``[batch, time, width]``."""
        batch, time, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, time, width))
        out: Tensor = x + self.feed(self.norms[1](x))
        return out


class GPT(nn.Module):
    """Character-level GPT.

    Maps ``[batch, time]`` of character numbers to logits ``[batch, time, characters]``.

    Args:
        characters: number of different characters.
    """

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(characters, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(WIDTH, HEADS) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, characters)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the next characters."""
        embedded = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        out: Tensor = self.head(self.norm(self.blocks(embedded)))
        return out


def next_character(model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
    """Return the mean cross entropy of the next character, in nats."""
    inputs, target = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), target.flatten()), {}


@lru_cache(maxsize=1)
def gpt(folder: Path) -> pl.Job:
    """Return the job; no folder of data is needed."""
    text = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    characters = sorted(set(text))
    numbers = {character: number for number, character in enumerate(characters)}
    stream = torch.tensor([numbers[character] for character in text])
    end = int((1 - VALIDATION) * len(stream))
    training, validation = _windows(stream[:end], CONTEXT // 2), _windows(stream[end:], CONTEXT)
    chosen = torch.randperm(len(validation[0]), generator=torch.Generator().manual_seed(0))[:VALIDATION_SAMPLES]
    return pl.Job(
        name="char-gpt",
        model=partial(GPT, len(characters)),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        data=TensorDataset(*training),
        batch_size=8,
        step=next_character,
        eval_data=One((validation[0][chosen], validation[1][chosen])),
    )


def _windows(stream: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, ``[windows, CONTEXT]`` each."""
    windows = stream.unfold(0, CONTEXT + 1, stride)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
