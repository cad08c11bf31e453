"""Data sets that draw from every global generator, as augmentations do."""

import multiprocessing
import os
import random
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

SAMPLES = 96


def augmented(number):
    rng = np.random.default_rng(number)
    noise = torch.randn(5) + float(np.random.normal()) + random.random()  # as augmentations do
    return torch.tensor(rng.normal(size=5)) + 0.1 * noise.double(), number % 3


class Noisy(Dataset):
    def __getitem__(self, number):
        return augmented(number)

    def __len__(self):
        return SAMPLES


class NoisyStream(IterableDataset):
    def __iter__(self):
        return map(augmented, torch.randperm(SAMPLES).tolist())


class Failing(Noisy):
    """Data set that fails at one sample."""

    def __getitem__(self, number):
        if number == 17:
            raise KeyError("no such picture")
        return super().__getitem__(number)


class Deadly(Noisy):
    """Data set that ends its process at one sample."""

    def __getitem__(self, number):
        if number == 17:
            os._exit(3)
        return super().__getitem__(number)


class Signed(Noisy):
    """Data set that records in a folder the processes that read samples, with their parents."""

    def __init__(self, folder):
        self._folder = folder

    def __getitem__(self, number):
        parent = multiprocessing.parent_process()
        Path(self._folder, f"{parent.pid if parent else 0}-{os.getpid()}").touch()
        return super().__getitem__(number)
