"""Gradients that a loop hands in during its backward pass: their sums begin, unless the loop changes them."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from attached_threads import AttachedThreads
from early_uses import NotedGroup, make_small, note_uses
from loop_parts import BATCH, SAMPLES, adamw, loss_of, make_parts, of_the_mean_gradient, train
from paceline.engines.distributed.announced_sums.early_sum import EarlySum
from paceline.engines.distributed.announced_sums.rank_parameters import RankParameters
from paceline.engines.distributed.transport.connection import ConnectionLost
from paceline.tensors.flat_buffers import FlatLayout
from paceline.tensors.squared_norms import squared_norm
from paceline.user_loop.hooks.early_gradients import EarlyGradients
from paceline.user_loop.hooks.loop_tensors import hand_in
from paceline.user_loop.worker.exchange import LoopTask
from selections import parametrize_few

EXACT = 1e-12
RANKS = 2
STEPS = 2 * SAMPLES // BATCH // RANKS  # of two epochs


@pytest.fixture
def used(monkeypatch):
    make_small(monkeypatch)
    return note_uses(monkeypatch)


def trained(network, data, step=None, accumulate=1, server=False):
    """Return the batches of each step of the ranks, and the parameters of each rank."""
    parts = make_parts(network, data, adamw, batch_size=BATCH // accumulate)
    ranks = AttachedThreads(RANKS, parts, "bsp", server=server, accumulate=accumulate)
    loop = train(accumulate=accumulate) if step is None else train(step=step)
    steps = ranks.run_well(loop)
    return steps, [list(model.parameters()) for model, _, _ in ranks.parts]


def distance(ours, theirs):
    return max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_sums_of_bsp_begin_in_the_backward_pass_of_the_loop(accumulate, used, network, data):
    steps, [first, second] = trained(network, data, accumulate=accumulate)
    buckets = sum(each.requires_grad for each in network.parameters())
    assert len(used) == RANKS * STEPS
    assert sorted(set(used)) == [0, buckets], "each bucket begins before the step, but for the first one of a run"
    assert used.count(0) == RANKS
    assert distance(first, of_the_mean_gradient(network, adamw, steps)) < EXACT
    assert all(map(torch.equal, first, second)), "all ranks have the same bits"


def assert_are_those_of_a_server(ranks, network, data, step):
    [first, second], (_, [expected, _]) = ranks, trained(network, data, step, server=True)
    assert distance(first, expected) < EXACT
    assert all(map(torch.equal, first, second)), "all ranks have the same bits"


def clipping(model, optimizer, batches):
    optimizer.zero_grad()
    loss_of(model, *batches[0]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


def twice(model, optimizer, batches):
    optimizer.zero_grad()
    loss_of(model, *batches[0]).backward()
    (0.1 * model.last.weight.square().sum()).backward()
    optimizer.step()


def anew(model, optimizer, batches):
    loss_of(model, *batches[0]).backward()
    optimizer.zero_grad()
    (2 * loss_of(model, *batches[0])).backward()
    optimizer.step()


def gradients(model):
    return [each.grad for each in model.parameters() if each.grad is not None]


def through_data(model, optimizer, batches):
    optimizer.zero_grad()
    loss_of(model, *batches[0]).backward()
    for each in gradients(model):
        each.data.mul_(0.5)
    optimizer.step()


def of_signs(model, optimizer, batches):
    optimizer.zero_grad()
    (-loss_of(model, *batches[0])).backward()
    for each in gradients(model):
        each.data.neg_()
    optimizer.step()


def scaling(model, optimizer, batches):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer.zero_grad()
    scaler.scale(loss_of(model, *batches[0])).backward()
    scaler.step(optimizer)


@parametrize_few("step", [clipping, twice, anew, through_data, of_signs, scaling], keep=6)
def test_a_loop_that_changes_its_gradients_hands_in_what_it_steps_with(step, used, network, data):
    _, ranks = trained(network, data, step)
    assert len(used) == RANKS * (STEPS - 1), "the sum of the step with the first change is made anew"
    assert set(used) == {0}, "and then none begins in a backward pass"
    assert_are_those_of_a_server(ranks, network, data, step)


def test_a_loop_that_leaves_a_parameter_out_in_some_steps_sums_early(used, network, data):
    def step(model, optimizer, batches):
        optimizer.zero_grad()
        x, y = batches[0]
        is_odd = int(y.sum()) % 2
        (loss_of(model, x, y) + is_odd * model.other.square().sum() if is_odd else loss_of(model, x, y)).backward()
        optimizer.step()

    network = copy.deepcopy(network)
    network.other = nn.Parameter(torch.ones(2, dtype=torch.float64))
    _, ranks = trained(network, data, step)
    assert len(used) == RANKS * STEPS
    assert max(used) > 0
    assert_are_those_of_a_server(ranks, network, data, step)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_that_have_a_graph_are_summed_early(used, network, data):
    def step(model, optimizer, batches):
        optimizer.zero_grad()
        loss_of(model, *batches[0]).backward(create_graph=True)
        optimizer.step()

    _, ranks = trained(network, data, step)
    assert max(used) > 0
    assert_are_those_of_a_server(ranks, network, data, step)


@pytest.mark.usefixtures("used")
def test_a_sum_that_fails_is_made_anew_from_the_gradients_that_the_loop_has_left(monkeypatch, network, data):
    failed, wait = [], RankParameters.await_early

    def failing(parameters):
        if parameters.number == 3 and parameters not in failed:
            failed.append(parameters)
            raise ConnectionLost("scripted")
        wait(parameters)

    monkeypatch.setattr(RankParameters, "await_early", failing)
    steps, [first, second] = trained(network, data)
    assert len(failed) == RANKS
    assert distance(first, of_the_mean_gradient(network, adamw, steps)) < EXACT
    assert all(map(torch.equal, first, second)), "all ranks have the same bits"


@pytest.mark.parametrize("change", [lambda each: each.mul_(0.9), Tensor.neg_], ids=["scale", "sign"])
def test_a_change_of_one_element_is_seen(change):
    model = nn.Linear(1000, 1)
    parameters, layout = list(model.parameters()), FlatLayout(model)
    task = LoopTask(minibatch=None, upcoming=(), model=model, gradient=layout.allocate(), on_ready=lambda *_: None)
    early = EarlyGradients(parameters, 1, lambda: task)
    model(torch.ones(1, 1000)).square().sum().backward()
    assert early.unchanged(task).keys() == {0, 1}
    change(model.weight.grad.data[0, 7])
    assert early.unchanged(task).keys() == {1}


ACTIONS = ["backward", "one parameter", "scale", "scale data", "flip data", "drop", "hand in", "skip", "next task"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(ACTIONS), max_size=12), st.integers(1, 2))
def test_the_sum_has_the_gradients_of_the_step_or_is_not_used_and_the_memory_can_have_them(actions, passes):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    parameters, layout = list(model.parameters()), FlatLayout(model)
    gradient = layout.allocate()
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        total = EarlySum(layout, gradient)

    def new_task():
        total.begin(NotedGroup())
        return LoopTask(minibatch=None, upcoming=(), model=model, gradient=gradient, on_ready=on_ready)

    def on_ready(i, computed=None):
        return total.on_accumulated(i) if computed is None else total.take(i, computed)

    task = new_task()
    early = EarlyGradients(parameters, passes, lambda: task)
    for action in [*actions, "hand in"]:
        match action:
            case "backward":
                model(torch.ones(1, 2)).square().sum().backward()
            case "one parameter":
                parameters[0].square().sum().backward()
            case "scale":
                for each in parameters[1:]:
                    if each.grad is not None:
                        each.grad.mul_(2)
            case "scale data" | "flip data":
                for each in parameters[1:]:
                    if each.grad is not None:
                        each.grad.data.mul_(2 if action == "scale data" else -1)
            case "drop":
                model.zero_grad()
            case "next task":
                task = new_task()
            case "hand in" | "skip":
                if action == "skip":
                    model.zero_grad()
                expected = [torch.zeros_like(each) if each.grad is None else each.grad.clone() for each in parameters]
                have = [i for i, each in enumerate(parameters) if each.grad is not None]
                unchanged = early.unchanged(task)
                norms = hand_in(task, parameters, [], copied=unchanged)
                early.end(task, unchanged)
                assert sorted(gradient.written) == sorted(norms) == have
                assert all(torch.equal(norm, squared_norm(expected[i])) for i, norm in norms.items())
                if total.end():
                    assert all(
                        torch.equal(2 * mean, own) for mean, own in zip(total.total.parameters, expected, strict=True)
                    )
                total.complete_gradient()
                assert all(map(torch.equal, gradient.parameters, expected))
                task = new_task()
