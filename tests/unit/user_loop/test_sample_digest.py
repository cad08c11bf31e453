"""Digest of the first and the last sample: equal data, random data, data that are split by rank."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from allreduce_loops import AllReduceLoops
from attached_threads import AttachedThreads
from loop_parts import SAMPLES, adamw, make_network, numbered_data, train
from paceline.user_loop.data.sample_digest import sample_digest
from paceline.worker.seeding import RandomStates


class Made(Dataset):
    """Samples that a function makes of their numbers."""

    def __init__(self, make, count=6):
        self.make = make
        self.count = count
        self.read = []

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        self.read.append(number)
        return self.make(number)


class Image:
    """Stand-in for an image of PIL."""

    def __init__(self, number):
        self.number = number

    def tobytes(self):
        return bytes([self.number])


class Opaque:
    """Object of which nothing is known."""


KINDS = {
    "tensors": lambda number: (torch.full((2,), number), torch.tensor(number)),
    "dicts": lambda number: {"text": f"sample {number}", "label": number},
    "arrays": lambda number: [np.full(3, number), np.int64(number)],
    "texts": str,
    "images": lambda number: (Image(number), 0),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_digest_is_that_of_the_first_and_the_last_sample(name):
    make, digests = KINDS[name], []
    for shift in (0, 0, 1):
        data = Made(lambda number, by=shift: make(number + by))
        digests.append(sample_digest(DataLoader(data, batch_size=4, shuffle=True)))
        assert data.read == [0, 5] * 2
    assert digests[0] == digests[1] != digests[2]
    assert digests[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda number: torch.rand(2) + number,
        lambda number: np.random.rand(2) + number,  # augmentations use the global generator
        lambda number: random.random() + number,
        lambda number: Opaque(),
        lambda number: np.array([Opaque()]),
    ],
)
def test_an_augmentation_does_not_change_the_digest_nor_what_is_drawn_next(make):
    before = RandomStates()
    digests = {sample_digest(DataLoader(Made(make))) for _ in range(3)}
    assert RandomStates() == before
    assert len(digests) == 1
    assert digests != {""}


def test_samples_that_each_access_draws_anew_have_no_digest():
    own = np.random.default_rng()
    assert sample_digest(DataLoader(Made(lambda number: own.random()))) == ""
    assert sample_digest(DataLoader([])) == ""


class OfTheProcess(Dataset):
    """Samples that can be read only in a process of the DataLoader."""

    def __len__(self):
        return 4

    def __getitem__(self, number):
        return self.opened[number] + torch.rand(1)


def open_data(_):
    torch.manual_seed(random.SystemRandom().randrange(2**32))
    torch.utils.data.get_worker_info().dataset.opened = torch.arange(4)


@pytest.mark.slow
@pytest.mark.processes
def test_the_samples_are_read_in_a_process_of_the_loader():
    loader = DataLoader(OfTheProcess(), num_workers=2, worker_init_fn=open_data)
    assert sample_digest(loader) == sample_digest(loader) != ""
    assert not hasattr(loader.dataset, "opened")


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize(("protocol", "kind"), [("bsp", AttachedThreads), ("all_reduce", AllReduceLoops)])
def test_a_rank_with_a_part_of_the_data_is_named_once(protocol, kind, is_split, caplog):
    parts = iter([range(0, SAMPLES, 2), range(1, SAMPLES, 2)] if is_split else [range(SAMPLES)] * 2)

    def make():
        model = make_network()
        return model, adamw(model), DataLoader(Subset(numbered_data(), next(parts)), batch_size=4, shuffle=True)

    kind(2, make, protocol).run(train(epochs=1))
    said = [each for each in caplog.messages if "has another first or last sample than rank 0" in each]
    assert len(said) == is_split
    assert all("give every rank the whole data set" in each for each in said)
