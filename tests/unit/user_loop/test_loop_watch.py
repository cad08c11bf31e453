"""What a loop changes after attach has read it is refused by name at the next step, or has no effect."""

import copy

import pytest
import torch
from torch.utils.data import DataLoader

import paceline as pl
from allreduce_loops import AllReduceLoops
from attached_threads import AttachedThreads
from loop_parts import BATCH, make_network, make_parts, numbered_data, sgd, step
from paceline.user_loop.hooks.loop_watch import LoopWatch
from selections import parametrize_each_once, parametrize_few

EXACT = 1e-12


@torch.no_grad()
def clamp(model, optimizer):
    for parameter in model.parameters():
        parameter.clamp_(-0.1, 0.1)


def load(model, optimizer):
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def write_data(model, optimizer):
    model.last.weight.data.mul_(2)


def swap_for_an_evaluation(model, optimizer):
    own = copy.deepcopy(model.state_dict())
    load(model, optimizer)
    model.load_state_dict(own)


def unfreeze(model, optimizer):
    model.frozen.requires_grad_(True)


def freeze(model, optimizer):
    model.last.requires_grad_(False)


def replace(model, optimizer):
    model.last.bias = torch.nn.Parameter(torch.zeros(1).double())


def parametrize(model, optimizer):
    torch.nn.utils.parametrizations.weight_norm(model.last)


def grow(model, optimizer):
    model.extra = torch.nn.Linear(1, 1)


def add_group(model, optimizer):
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})


def take_from_group(model, optimizer):
    optimizer.param_groups[1]["params"].pop()


def regroup(model, optimizer):
    optimizer.param_groups[1]["params"].insert(0, optimizer.param_groups[0]["params"].pop())


def drop_group(model, optimizer):
    optimizer.param_groups.pop()


def change_each_step(change):
    def loop(run, model, optimizer):
        steps = 0
        for _ in run.epochs(1):
            for batch in run.loader:
                step(model, optimizer, [batch])
                change(model, optimizer)
                steps += 1
        return steps

    return loop


def attached(change, protocol="bsp"):
    ranks = AttachedThreads(1, make_parts(make_network(), numbered_data()), protocol)
    [answer] = ranks.run(change_each_step(change))
    return answer, ranks.parts[0][0]


@pytest.mark.parametrize(
    ("write", "names"),
    [(clamp, "first.weight, norm.weight"), (load, "first.weight, norm.weight"), (write_data, "last.weight of")],
)
def test_parameters_that_the_loop_writes_are_refused_by_name(write, names):
    answer, _ = attached(write)
    assert isinstance(answer, pl.UsageError)
    assert f"has written to {names}" in str(answer)


def replace_data(model, optimizer):
    for parameter in model.parameters():
        parameter.data = parameter.data.clamp(-0.1, 0.1)


@parametrize_each_once(
    change=[clamp, load, write_data, replace_data],
    protocol=["all_reduce", "local_sgd(H=2)", "bsp + local_steps(H=2)"],
)
def test_where_each_rank_steps_it_keeps_what_its_loop_writes(protocol, change):
    kind = AttachedThreads if "bsp" in protocol else AllReduceLoops
    ranks = kind(1, make_parts(make_network(), numbered_data(), shuffle=False), protocol)
    assert ranks.run(change_each_step(change)) == [12]
    expected = make_network()
    optimizer = sgd(expected)
    for batch in DataLoader(numbered_data(), batch_size=BATCH):
        step(expected, optimizer, [batch])
        change(expected, optimizer)
    for ours, theirs in zip(ranks.parts[0][0].parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (unfreeze, "the model trains frozen,"),
        (freeze, "the model no longer trains last.weight, last.bias,"),
        (replace, "the model trains last.bias,"),
        (
            parametrize,
            "the model trains last.parametrizations.weight.original0, last.parametrizations.weight.original1,",
        ),
        (grow, "the model trains extra.weight, extra.bias,"),
        (add_group, "parameter group 2 of the optimizer has other parameters"),
        (take_from_group, "parameter group 1 of the optimizer has other parameters"),
        (regroup, "parameter group 0 of the optimizer has other parameters"),
        (drop_group, "parameter group 1 of the optimizer is missing"),
    ],
)
def test_other_trained_parameters_are_refused_by_name(change, message):
    model = make_network()
    optimizer = sgd(model)
    watch = LoopWatch(model, optimizer)
    watch.look()
    change(model, optimizer)
    with pytest.raises(pl.UsageError, match=message):
        watch.look()


@parametrize_few("protocol", ["bsp", "bsp + local_steps(H=2)"], keep=1)
def test_they_are_refused_at_the_next_step(protocol):
    answer, _ = attached(unfreeze, protocol)
    assert isinstance(answer, pl.UsageError)
    assert "finish this run" in str(answer)


def test_values_that_are_restored_before_the_next_step_are_no_change():
    (steps, ours), (_, theirs) = attached(swap_for_an_evaluation), attached(lambda *_: None)
    assert steps == 12
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


def test_parameters_that_were_tied_through_data_after_attach_are_refused_at_the_start():
    model = make_network()
    watch = LoopWatch(model, sgd(model))
    model.last.bias.data = model.last.weight.data[0, :1]
    with pytest.raises(pl.UsageError, match=r"last\.weight and last\.bias share memory"):
        watch.start(debug=False)
