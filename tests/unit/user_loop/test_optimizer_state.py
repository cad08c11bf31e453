"""State of the user's optimizer: it goes to the server at the start, and rank 0 reads it there."""

import copy
import threading
from functools import partial

import pytest
import torch

import paceline as pl
from attached_threads import AttachedThreads
from loop_parts import adamw, loss_of, make_parts, sgd, step
from machine_speed import scaled
from paceline.server.optimizer_rules import AdamRule
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.flat_buffers import FlatLayout
from paceline.user_loop.server.optimizer_state import load_named_state, named_state, state_reader
from paceline.user_loop.step_policies import ServerSteps
from paceline.worker.torch_utils import build_model
from selections import parametrize_few
from tiny_jobs import tiny_job, update_of

EXACT = 1e-12


def reference(network, make_optimizer, steps, first_state=None):
    """Return model and optimizer after steps by the mean of the ranks' gradients, without a scheduler."""
    model = copy.deepcopy(network)
    optimizer = make_optimizer(model)
    if first_state is not None:
        optimizer.load_state_dict(first_state)
    for of_ranks in zip(*steps, strict=True):
        optimizer.zero_grad()
        for batches in of_ranks:
            for x, y in batches:
                (loss_of(model, x, y) / len(of_ranks)).backward()
        optimizer.step()
    return model, optimizer


def check_equal_states(ours, theirs):
    assert ours.keys() == theirs.keys()
    for number, state in ours.items():
        assert state.keys() == theirs[number].keys()
        for key, value in state.items():
            assert (value - theirs[number][key]).abs().max() < EXACT


def trained(epochs=1, before=lambda optimizer: None):
    """Return a loop that returns the batches of its steps, and the states after the second step and at the end."""

    def loop(run, model, optimizer):
        before(optimizer)
        steps, states = [], []
        for _ in run.epochs(epochs):
            for batch in run.loader:
                step(model, optimizer, [batch])
                steps.append([batch])
                if len(steps) == 2:
                    states.append(optimizer.state_dict())
        return steps, [*states, optimizer.state_dict()]

    return loop


@parametrize_few("make_optimizer", [sgd, adamw], keep=1)
def test_the_state_dict_of_rank_0_is_that_of_the_same_training_in_one_process(make_optimizer, network, data):
    answers = AttachedThreads(2, make_parts(network, data, make_optimizer), "bsp").run(trained())
    (steps, [early, last]), (of_rank_1, [_, last_of_rank_1]) = answers
    both = list(zip(steps, of_rank_1, strict=True))
    _, expected = reference(network, make_optimizer, zip(*both, strict=True))
    check_equal_states(last["state"], expected.state_dict()["state"])
    _, expected = reference(network, make_optimizer, zip(*both[:2], strict=True))
    check_equal_states(early["state"], expected.state_dict()["state"])
    assert last_of_rank_1["state"] == {}


def test_the_state_of_another_rank_is_named_in_a_warning(network, data, caplog):
    AttachedThreads(2, make_parts(network, data), "bsp").run(trained())
    assert caplog.text.count("has no state on this rank: that of rank 0 has the server's") == 2


def test_a_released_run_warns_no_more(network, data, caplog):
    def loop(run, model, optimizer):
        trained()(run, model, optimizer)
        run.release()
        optimizer.state_dict()

    assert AttachedThreads(2, make_parts(network, data), "bsp").run(loop) == [None, None]
    assert caplog.text.count("has no state on this rank") == 2  # of `trained`, on rank 1


def test_a_run_begins_with_a_state_that_was_loaded_after_attach(network, data):
    first = copy.deepcopy(network)
    optimizer = adamw(first)
    for number in range(3):
        step(first, optimizer, [data[4 * number : 4 * number + 4]])
    saved = optimizer.state_dict()
    loop = trained(before=lambda optimizer: optimizer.load_state_dict(saved))
    ranks = AttachedThreads(2, make_parts(network, data, adamw), "bsp")
    (steps, [_, last]), (of_rank_1, _) = ranks.run(loop)
    model, expected = reference(network, adamw, [steps, of_rank_1], saved)
    check_equal_states(last["state"], expected.state_dict()["state"])
    for ours, theirs in zip(ranks.parts[1][0].parameters(), model.parameters(), strict=True):
        assert (ours - theirs).abs().max() < EXACT


def test_a_state_cannot_be_loaded_during_the_run(network, data):
    def loop(run, model, optimizer):
        for _ in run.epochs(1):
            for batch in run.loader:
                step(model, optimizer, [batch])
                optimizer.load_state_dict(optimizer.state_dict())

    for error in AttachedThreads(2, make_parts(network, data), "bsp").run(loop):
        assert isinstance(error, pl.RunError)
        assert "load it before the first batch of run.loader" in str(error)


def test_an_optimizer_for_graphs_of_a_gpu_is_stepped_by_the_server(network, data):
    def stepping(model, **options):
        return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], **options)

    parts = make_parts(network, data, partial(stepping, capturable=True))
    (steps, [_, last]), (of_rank_1, _) = AttachedThreads(2, parts, "bsp").run(trained())
    _, expected = reference(network, stepping, [steps, of_rank_1])
    check_equal_states(last["state"], expected.state_dict()["state"])


def test_a_state_of_nested_values_comes_back(network):
    optimizer, other = sgd(network), sgd(network)
    nested = {"rows": [torch.ones(2), None, (torch.zeros(3, dtype=torch.int64), 2.5)], "kind": "left", "is_on": True}
    optimizer.state[network.last.bias] |= {"nested": nested, "list": [], "steps": 3}
    load_named_state(other, network, named_state(optimizer, network))
    loaded = other.state[network.last.bias]
    assert (loaded["list"], loaded["steps"]) == ([], 3)
    assert repr(loaded["nested"]) == repr(nested)


def test_a_state_of_other_objects_is_refused(network):
    optimizer = sgd(network)
    optimizer.state[network.last.bias]["counts"] = [object()]
    with pytest.raises(pl.UsageError, match=r"counts of last.bias in the state of the optimizer is of type list"):
        named_state(optimizer, network)


def test_a_reader_waits_for_the_end_of_a_step_on_blocks(monkeypatch):
    job = tiny_job(optimizer=partial(torch.optim.AdamW, lr=0.1))
    model = build_model(job, 0)
    layout = FlatLayout(model)
    server = ParameterServer(job, model, layout, per_epoch=None)
    state, read, step = state_reader(server), [], AdamRule.step
    reader = threading.Thread(target=lambda: read.append(state()), daemon=True)

    def within_the_step(rule, vectors):
        reader.start()
        reader.join(0.05)
        assert reader.is_alive()
        return step(rule, vectors)

    monkeypatch.setattr(AdamRule, "step", within_the_step)
    for _ in range(2):  # the first step is that of torch
        server.enqueue(layout.allocate(), 8)
        server.apply(update_of(1))
    reader.join(scaled(10))
    assert {float(value) for name, value in read[0].items() if name.startswith("step ")} == {2.0}


def test_the_state_of_a_frozen_parameter_stays_here(network):
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[network.frozen]["momentum_buffer"] = torch.ones(1)
    optimizer.state[network.last.bias]["momentum_buffer"] = torch.ones(1)
    assert named_state(optimizer, network).keys() == {"momentum_buffer last.bias"}


def test_a_rank_frees_the_state_that_the_server_has(network):
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[network.last.bias]["momentum_buffer"] = torch.ones(1)
    steps = ServerSteps(optimizer, network)
    assert optimizer.state
    steps.start(None)
    assert not optimizer.state
    steps.close()
