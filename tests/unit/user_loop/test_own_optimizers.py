"""Attached loops whose optimizer is of a class of their own: without a server a copy of it steps on each rank."""

import threading

import pytest
import pytorch_optimizer
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import paceline as pl
from attached_threads import AttachedThreads
from loop_parts import loop_of, loss_of, make_parts, of_the_mean_gradient, sgd, step, train
from paceline.user_loop.server.description import HeldOptimizer, describe, make_job, tensors_of
from paceline.user_loop.worker.optimizer_copy import pickled_by_value
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
@pytest.mark.parametrize("server", [False, True], ids=["no server", "server"])
@parametrize_few("protocol", ["balanced(m=4)", "bsp"], keep=2)
def test_the_updates_are_those_of_the_optimizer_of_torch(protocol, server, with_schedule, data):
    ours, _ = trained(data, protocol, own, server=server, with_schedule=with_schedule)
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


class Warming(OwnSGD):
    """SGD whose momentum grows with its steps, which it counts in its options."""

    def __init__(self, params):
        torch.optim.Optimizer.__init__(self, params, {"lr": 0.05, "momentum": 0.9, "k": 0, "is_warm": False})

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            group["momentum"] = 0.9 - 0.5 / group["k"]
            group["is_warm"] = group["k"] > 2
        super().step(closure)


def warming(model):
    return Warming(model.parameters())


@pytest.mark.parametrize("server", [False, True], ids=["no server", "server"])
@pytest.mark.parametrize("make", [own, warming])
def test_a_run_is_resumed_with_the_state_of_its_optimizer(make, server, data, tmp_path):
    whole, _ = trained(data, "bsp", make, server=server)
    trained(data, "bsp", make, server=server, out=tmp_path / "run", stop="updates=3")
    resumed, _ = trained(data, "bsp", make, server=server, resume=tmp_path / "run")
    assert (parameters_of(resumed) - parameters_of(whole)).abs().max() < EXACT


@pytest.mark.parametrize("server", [False, True], ids=["no server", "server"])
def test_options_that_its_steps_change_are_its_own(server, data):
    ranks, states = trained(data, "bsp", warming, server=server)
    updates = ranks.server.result.history.totals.updates
    _, optimizer, _ = ranks.parts[0]
    assert optimizer.param_groups[0] | {"params": None} == {
        "params": None,
        "lr": 0.05,
        "momentum": 0.9 - 0.5 / updates,
        "k": updates,
        "is_warm": True,
    }
    assert states[0]["param_groups"][0]["k"] == updates


def matrices():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 1, bias=False)).double()


def free_of_schedules(model):
    optimizer = pytorch_optimizer.ScheduleFreeAdamW(model.parameters(), lr=0.01, warmup_steps=3)
    optimizer.train()
    return optimizer


OF_LIBRARIES = {
    "Lion": lambda model: pytorch_optimizer.Lion(model.parameters(), lr=0.01),
    "Prodigy": lambda model: pytorch_optimizer.Prodigy(model.parameters(), lr=0.5),
    "Shampoo": lambda model: pytorch_optimizer.Shampoo(model.parameters(), lr=0.01),
    "SOAP": lambda model: pytorch_optimizer.SOAP(model.parameters(), lr=0.01),
    "schedule-free": free_of_schedules,
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01),
    "Muon": lambda model: torch.optim.Muon(model.parameters(), lr=0.02),
}


@pytest.mark.parametrize("server", [False, True], ids=["no server", "server"])
@parametrize_few("name", list(OF_LIBRARIES), keep=3)
def test_optimizers_of_libraries_step_as_in_one_process(name, server, data):
    if name in ("Muon", "Adafactor") and not hasattr(torch.optim, name):
        pytest.skip("this version of torch has none")
    if name == "SOAP" and server:
        pytest.skip("its eigenvectors turn the rounding of another order of sums into other steps")
    make = OF_LIBRARIES[name]
    ranks = AttachedThreads(RANKS, make_parts(matrices(), data, make), "bsp", server=server)
    steps = ranks.run(train(epochs=1))
    for each in steps:
        if isinstance(each, BaseException):
            raise each
    expected = of_the_mean_gradient(matrices(), make, steps)
    for model, _, _ in ranks.parts:
        for own, alone in zip(model.parameters(), expected, strict=True):
            assert (own - alone).abs().max() < EXACT


@pytest.mark.parametrize("server", [False, True], ids=["no server", "server"])
def test_a_schedule_free_optimizer_evaluates_at_its_own_point(server, data):
    def flat(model):
        return torch.cat([each.detach().reshape(-1) for each in model.parameters()])

    def loop(run, model, optimizer):
        steps, evaluated = [], []
        for _ in run.epochs(1):
            for batch in run.loader:
                step(model, optimizer, [batch])
                steps.append([batch])
                if len(steps) != 3:
                    continue
                try:
                    optimizer.eval()
                except pl.RunError as error:
                    evaluated.append(str(error))
                else:
                    evaluated.append(flat(model))
                    optimizer.train()
        return steps, evaluated

    ranks = AttachedThreads(RANKS, make_parts(matrices(), data, free_of_schedules), "bsp", server=server)
    (steps, [first]), (of_rank_1, [second]) = ranks.run(loop)
    alone = matrices()
    optimizer = free_of_schedules(alone)
    for number, batches in enumerate(zip(steps, of_rank_1, strict=True), 1):
        optimizer.zero_grad()
        for [(x, y)] in batches:
            (loss_of(alone, x, y) / RANKS).backward()
        optimizer.step()
        if number == 3:
            optimizer.eval()
            expected = flat(alone)
            optimizer.train()
            assert (expected - flat(alone)).abs().max() > 1e-4
    assert (first - expected).abs().max() < EXACT
    if server:
        assert "evaluate there, or give cluster='torchrun(server=false)'" in second
    else:
        assert torch.equal(first, second)
    for model, own, _ in ranks.parts:
        assert (flat(model) - flat(alone)).abs().max() < EXACT
        assert ("eval" in vars(own)) == (server and model is ranks.parts[1][0])
    optimizer.eval()
    ranks.parts[0][1].eval()
    assert (flat(ranks.parts[0][0]) - flat(alone)).abs().max() < EXACT


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


class Decaying(OwnSGD):
    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["lr"] *= 0.9


class OpaqueOption(OwnSGD):
    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["last"] = object()


class OpaqueState(OwnSGD):
    def change(self, group, parameter, state):
        super().change(group, parameter, state)
        state.setdefault("history", []).append(object())


class WithLock(OwnSGD):
    def __init__(self, params):
        super().__init__(params)
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("kind", "server", "text"),
    [
        (Decaying, False, "a step of the optimizer Decaying changes its learning rate, but that of the loop is used"),
        (Decaying, True, "a step of the optimizer Decaying changes its learning rate, but that of the loop is used"),
        (OpaqueOption, False, "changes its option last, which is of type object, expected tensors, numbers and plain"),
        (OpaqueState, False, "is of type list, expected tensors, numbers and plain containers of them"),
        (OpaqueState, True, "is of type list, expected tensors, numbers and plain containers of them"),
        (
            WithLock,
            False,
            "the optimizer WithLock cannot be copied, but without a server a copy of it steps on each rank",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_cannot_be_copied_is_refused_by_name(kind, server, text, data):
    with pytest.raises(pl.PacelineError) as error:
        trained(data, "bsp", lambda model: kind(model.parameters()), server=server)
    assert text in f"{error.value} {getattr(error.value, '__notes__', '')}"


def test_what_cannot_be_pickled_is_refused_by_name():
    model = network()
    with pytest.raises(pl.UsageError, match="the optimizer WithLock cannot be sent to the process of the server"):
        pickled_by_value(WithLock(model.parameters()), model)


def test_the_coordinator_holds_the_state_and_does_not_step(data):
    model, optimizer, loader = make_parts(network(), data, own)()
    training = describe(loop_of(model, optimizer, loader))
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
