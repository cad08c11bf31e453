"""Models whose parameters share memory are refused by the names of both tensors."""

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.jobs.shared_memory import why_not_apart
from tiny_jobs import tiny_job


def network():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))


def tied_data(model):
    model[1].weight.data = model[0].weight.data


def tied_to_a_frozen_one(model):
    tied_data(model)
    model[1].weight.requires_grad_(False)


def view(model):
    model[1].bias = nn.Parameter(model[0].weight.data[2])


def transposed(model):
    model[1].weight = nn.Parameter(model[0].weight.data.t())


def buffer(model):
    model.register_buffer("first_row", model[0].weight.data[0])


@pytest.mark.parametrize(
    ("share", "names"),
    [
        (tied_data, "0.weight and 1.weight"),
        (tied_to_a_frozen_one, "0.weight and 1.weight"),
        (view, "0.weight and 1.bias"),
        (transposed, "0.weight and 1.weight"),
        (buffer, "0.weight and first_row"),
    ],
)
def test_shared_memory_is_found_by_name(share, names):
    model = network()
    share(model)
    assert why_not_apart(model).startswith(f"{names} share memory")
    model = network()
    share(model)
    with pytest.raises(pl.UsageError, match=f"{names} share memory"):
        tiny_job(model=model).build_model(0)
    with pytest.raises(pl.UsageError, match=f"{names} share memory"):
        tiny_job(model=lambda: model).build_model(0)


def one_parameter(model):
    model[1].weight = model[0].weight


def parts_of_one_vector(model):
    flat = torch.zeros(32)
    model[0].weight, model[1].weight = (nn.Parameter(part.view(4, 4)) for part in flat.split(16))


def parts_of_two_types(model):
    memory = torch.zeros(3 * 64, dtype=torch.uint8)
    model[0].weight = nn.Parameter(memory[:64].view(torch.float32).view(4, 4))
    model[1].weight = nn.Parameter(memory[64:].view(torch.float64).view(4, 4))


def interleaved_columns(model):
    both = torch.zeros(4, 8)
    model[0].weight, model[1].weight = nn.Parameter(both[:, ::2]), nn.Parameter(both[:, 1::2])


def frozen_only(model):
    tied_data(model)
    model.requires_grad_(False)


def empty(model):
    model[1].bias, model[0].bias = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(0))


@pytest.mark.parametrize(
    "share", [one_parameter, parts_of_one_vector, parts_of_two_types, interleaved_columns, frozen_only, empty]
)
def test_memory_of_their_own_is_accepted(share):
    model = network()
    share(model)
    assert why_not_apart(model) == ""


def test_a_frozen_copy_may_share_memory_where_parameters_stay_in_place():
    model = network()
    tied_to_a_frozen_one(model)
    assert why_not_apart(model, with_frozen=False) == ""
