"""Small GPT: a job with all its parts as users write them, and the plain loop that BSP replaces."""

import math
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import paceline as pl
from paceline.utils.rng import derived_seed
from paceline.worker.data_loader import MinibatchLoader, part_of
from paceline.worker.seeding import seeded
from paceline.worker.torch_utils import build_model

LETTERS, CONTEXT, WIDTH, HEADS, BLOCKS = 12, 16, 24, 2, 2
WORKERS, BATCH, MICROBATCHES = 2, 8, 2
WARM_UP, PEAK, FLOOR = 10, 3e-3, 0.1  # updates, learning rate, share of the peak at the end
CLIP_NORM = 0.5


class Crops(Dataset):
    """Random crops of one long text with random letters masked: an augmentation with its own draws."""

    def __init__(self, samples=256, seed=0, blots=0.05):
        rng = np.random.default_rng(seed)
        follows = rng.dirichlet(np.full(LETTERS, 0.3), size=LETTERS)  # a Markov chain, which a model can learn
        text = [0]
        for _ in range(4096):
            text.append(int(rng.choice(LETTERS, p=follows[text[-1]])))
        self.text = torch.tensor(text)
        self.samples, self.blots = samples, blots

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        start = int(torch.randint(len(self.text) - CONTEXT - 1, ()))
        crop = self.text[start : start + CONTEXT + 1].clone()
        crop[torch.rand(CONTEXT + 1) < self.blots] = index % LETTERS
        return crop[:-1], crop[1:]


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.before_attention, self.before_network = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        # A bias of the keys shifts all scores alike. Its gradient is a rounding error, of which AdamW makes full steps.
        self.queries_keys_values, self.joined = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.network = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        batch, length, _ = x.shape
        parts = self.queries_keys_values(self.before_attention(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        heard = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.dropout(self.joined(heard.transpose(1, 2).reshape(batch, length, WIDTH)))
        return x + self.dropout(self.network(self.before_network(x)))


class GPT(nn.Module):
    def __init__(self, dropout=0.1):
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block(dropout) for _ in range(BLOCKS)))
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, LETTERS, bias=False)

    def forward(self, letters):
        return self.head(self.last(self.blocks(self.letters(letters) + self.places.weight[: letters.shape[1]])))


def step(model, batch, autocast=False):
    letters, following = batch
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        return F.cross_entropy(model(letters).flatten(0, 1), following.flatten())


def adamw(parameters):
    """Return AdamW with two groups, as in every GPT: matrices with decay, biases and gains without."""
    parameters = list(parameters)
    groups = [
        {"params": [each for each in parameters if each.ndim >= 2], "weight_decay": 0.1},
        {"params": [each for each in parameters if each.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95))


def warm_up_and_cosine(gradients, updates):
    done = gradients / WORKERS
    if done < WARM_UP:
        return (done + 1) / WARM_UP
    way = min(1.0, (done - WARM_UP) / max(1, updates - WARM_UP))
    return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * way)) / 2


def double_gpt():
    return GPT().double()


def gpt_job(updates, *, autocast=False, samples=256, model=GPT):
    return pl.Job(
        model=model,
        optimizer=adamw,
        data=Crops(samples),
        batch_size=BATCH,
        step=partial(step, autocast=autocast),
        eval_data=Crops(64, blots=0.0),
        scheduler=partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=partial(warm_up_and_cosine, updates=updates)),
        clip_norm=CLIP_NORM,
        microbatches=MICROBATCHES,
        name="gpt",
    )


def plain_gpt(job, seed, updates):
    """Train without paceline, on the minibatches, dropout masks and crops of the workers' draws."""
    model = build_model(job, seed)
    optimizer = adamw(model.parameters())
    scheduler = job.scheduler(optimizer)
    loader = MinibatchLoader(job, seed, WORKERS)
    model.train()
    for draw in range(1, updates + 1):
        optimizer.zero_grad()
        for worker in range(WORKERS):
            with seeded(derived_seed(seed, "gradient", worker, draw), torch.device("cpu")):
                batch = loader.batch(worker, draw, None)
                size = BATCH // MICROBATCHES
                for begin in range(0, BATCH, size):
                    loss = job.step(model, part_of(batch, begin, begin + size))
                    (loss / MICROBATCHES / WORKERS).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        for _ in range(WORKERS):  # a step of the scheduler is a gradient
            scheduler.step()
    return model
