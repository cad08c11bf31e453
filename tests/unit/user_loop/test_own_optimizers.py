"""Attached loops whose optimizer is of a class of their own: without a server a copy of it steps on each rank."""

import threading

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import paceline as pl
from attached_threads import AttachedThreads
from loop_parts import loop_of, make_parts, sgd, step
from paceline.user_loop.server.description import HeldOptimizer, describe, make_job, tensors_of
from selections import parametrize_few

EXACT = 1e-12
RANKS = 2


class OwnSGD(torch.optim.Optimizer):
    """SGD with momentum, which counts the steps of each parameter as a number."""

    def __init__(self, params, lr=0.05, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.change(group, parameter, self.state[parameter])

    def change(self, group, parameter, state):
        state["count"] = state.get("count", 0) + 1
        state["norm"] = float(parameter.grad.norm())
        velocity = state.setdefault("velocity", torch.zeros_like(parameter))
        velocity.mul_(group["momentum"]).add_(parameter.grad)
        parameter.add_(velocity, alpha=-group["lr"])


def own(model):
    return OwnSGD(model.parameters())


def torch_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 1)).double()


def trained(data, protocol, make_optimizer, *, server=False, with_schedule=False, **settings):
    """Return the ranks after two epochs; a rank's answer is the state of its optimizer during the run."""

    def loop(run, model, optimizer):
        if with_schedule:
            run.set_scheduler(StepLR(optimizer, 2, gamma=0.5))
        state = None
        for _ in run.epochs(2):
            for batch in run.loader:
                step(model, optimizer, [batch])
                state = optimizer.state_dict()
        return state

    ranks = AttachedThreads(RANKS, make_parts(network(), data, make_optimizer), protocol, server=server, **settings)
    states = ranks.run(loop)
    for each in states:
        if isinstance(each, BaseException):
            raise each
    return ranks, states


def parameters_of(ranks, rank=0):
    model, _, _ = ranks.parts[rank]
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])


@pytest.mark.parametrize("with_schedule", [False, True], ids=["constant", "schedule"])
@parametrize_few("protocol", ["balanced(m=4)", "bsp"], keep=2)
def test_the_updates_are_those_of_the_optimizer_of_torch(protocol, with_schedule, data):
    ours, _ = trained(data, protocol, own, with_schedule=with_schedule)
    theirs, _ = trained(data, "bsp", torch_sgd, with_schedule=with_schedule)
    for rank in range(RANKS):
        assert (parameters_of(ours, rank) - parameters_of(theirs)).abs().max() < EXACT


def test_each_rank_has_the_state_of_its_copy_in_the_run_and_after_it(data):
    ranks, states = trained(data, "bsp", own)
    for state in states:
        assert {each["count"] for each in state["state"].values()} == {states[0]["state"][0]["count"]}
    optimizers = [optimizer for _, optimizer, _ in ranks.parts]
    for optimizer in optimizers:
        for state in optimizer.state.values():
            assert (type(state["count"]), type(state["norm"])) == (int, float)
            assert state["count"] == ranks.server.result.history.totals.updates
    first, second = ([each["velocity"] for each in optimizer.state.values()] for optimizer in optimizers)
    assert all(map(torch.equal, first, second))


def test_a_run_is_resumed_with_the_state_of_its_optimizer(data, tmp_path):
    whole, _ = trained(data, "bsp", own)
    trained(data, "bsp", own, out=tmp_path / "run", stop="updates=3")
    resumed, _ = trained(data, "bsp", own, resume=tmp_path / "run")
    assert torch.equal(parameters_of(resumed), parameters_of(whole))


class Half(torch.optim.SGD):
    """SGD of torch with half the step."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
        return super().step(closure)


Half.__name__ = "SGD"


def test_a_subclass_with_the_name_of_a_class_of_torch_steps_itself(data):
    halved, _ = trained(data, "bsp", lambda model: Half(model.parameters(), lr=0.05))
    whole, _ = trained(data, "bsp", lambda model: torch.optim.SGD(model.parameters(), lr=0.05))
    assert not torch.equal(parameters_of(halved), parameters_of(whole))
    assert torch.equal(parameters_of(halved, 0), parameters_of(halved, 1))


class CountingOption(OwnSGD):
    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["lr"] *= 0.9


class ListState(OwnSGD):
    def change(self, group, parameter, state):
        super().change(group, parameter, state)
        state.setdefault("history", []).append(1)


class WithLock(OwnSGD):
    def __init__(self, params):
        super().__init__(params)
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("kind", "server", "text"),
    [
        (CountingOption, False, "a step of the optimizer CountingOption changes its option lr, but those of the loop"),
        (ListState, False, "is of type list, expected a tensor or a number"),
        (
            WithLock,
            False,
            "the optimizer WithLock cannot be copied, but without a server a copy of it steps on each rank",
        ),
        (
            OwnSGD,
            True,
            "the optimizer OwnSGD is not of torch.optim, but the server steps a copy of it without your code",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_cannot_be_copied_is_refused_by_name(kind, server, text, data):
    with pytest.raises(pl.PacelineError) as error:
        trained(data, "bsp", lambda model: kind(model.parameters()), server=server)
    assert text in f"{error.value} {getattr(error.value, '__notes__', '')}"


def test_the_coordinator_holds_the_state_and_does_not_step(data):
    model, optimizer, loader = make_parts(network(), data, own)()
    training = describe(loop_of(model, optimizer, loader), has_server=False)
    job = make_job(training, tensors_of(model))
    held = job.optimizer([(name, each) for name, each in job.model.named_parameters() if each.requires_grad])
    assert isinstance(held, HeldOptimizer)
    assert type(held).__name__ == "OwnSGD"
    assert [group["momentum"] for group in held.param_groups] == [0.9]
    with pytest.raises(NotImplementedError, match="OwnSGD steps on each rank"):
        held.step()


def test_sgd_of_torch_is_made_anew_as_before(data):
    model, optimizer, loader = make_parts(network(), data, sgd)()
    assert describe(loop_of(model, optimizer, loader)).is_of_torch
