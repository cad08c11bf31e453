"""The squared norm that is taken as gradients are copied is that of the memory, whatever autograd and others do."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.tensors.flat_buffers import FlatLayout
from paceline.tensors.squared_norms import PIECE, squared_norm_of
from paceline.worker import replica
from paceline.worker.gradient_source import GradientGroup
from paceline.worker.gradient_writer import GradientWriter
from paceline.worker.replica import Replica
from tiny_jobs import dataset, tiny_job

WIDTH = PIECE // 4 + 3  # the matrices of the models are more than one piece


class Wide(nn.Module):
    """Model whose first layer is called once or more often; autograd adds to its gradient at each reentrant call."""

    def __init__(self, dtype=torch.float32, calls=1, is_reentrant=False):
        super().__init__()
        self.first, self.last = nn.Linear(5, WIDTH, dtype=dtype), nn.Linear(WIDTH, 3, dtype=dtype)
        self.unused = nn.Linear(2, 2, dtype=dtype)
        self.calls, self.is_reentrant = calls, is_reentrant

    def forward(self, x):
        x = x.to(self.first.weight.dtype)
        call = partial(checkpoint, self.first, use_reentrant=True) if self.is_reentrant else self.first
        return self.last(torch.tanh(sum(call(x.requires_grad_()) for _ in range(self.calls))))


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, WIDTH, dtype=torch.complex64)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.last(self.first(x.to(torch.complex64)).abs())


class Transposed(Wide):
    """Model with hooks that replace a gradient by the same values in another order in memory."""

    def __init__(self):
        super().__init__()
        for parameter in (self.first.weight, self.last.weight):
            parameter.register_post_accumulate_grad_hook(self.transpose)

    @staticmethod
    def transpose(parameter):
        parameter.grad = parameter.grad.T.contiguous().T
        assert not parameter.grad.is_contiguous()


class Group(GradientGroup):
    """Group whose other process has no samples."""

    local_rank, size = 0, 1

    def begin(self, draw, minibatch, version):
        pass

    def check(self):
        pass

    def all_reduce(self, gradient, part):
        for flat in gradient.flat_parameters:
            flat.mul_(0.3)
        gradient.written.update(range(len(gradient.parameters)))
        return part

    def whole_norm(self, norm):
        return norm


def measured(model=Wide, group=None, **changes):
    """Return the scalars of two gradients, each with the norm of its memory."""
    job = tiny_job(model=model, data=dataset(dtype=torch.float32), **changes)
    worker = Replica(job, 0, 1, group=group)
    version, gradient = worker.layout.allocate(), worker.layout.allocate()
    for view, parameter in zip(version.parameters, worker.model.parameters(), strict=True):
        view.copy_(parameter.detach())
    for draw in (1, 2):
        stats = worker.gradient(0, draw, None, version, gradient)
        yield stats, squared_norm_of(gradient.parameters[i] for i in gradient.written)


@pytest.fixture
def reads(monkeypatch):
    """Sizes of the parameters that are read again."""
    sizes = []

    def squared_norm(tensor):
        sizes.append(tensor.numel())
        return inner(tensor)

    inner = replica.squared_norm
    monkeypatch.setattr(replica, "squared_norm", squared_norm)
    return sizes


DTYPES = {"float32": torch.float32, "float64": torch.float64, "bf16": torch.bfloat16, "float16": torch.float16}
ALL = [5 * WIDTH, WIDTH, 3 * WIDTH, 3]


@pytest.mark.parametrize(
    ("model", "changes", "again"),
    [
        *[(partial(Wide, dtype), {}, []) for dtype in DTYPES.values()],
        (Transposed, {}, []),
        (Complex, {}, []),
        (partial(Wide, calls=2), {}, []),
        (partial(Wide, calls=2, is_reentrant=True), {}, ALL[:2]),
        (Wide, {"microbatches": 3}, ALL),
        (Wide, {"group": Group()}, [*ALL, 4, 2]),
    ],
    ids=[*DTYPES, "strided", "complex", "used twice", "reentrant", "microbatches", "group"],
)
def test_the_norm_is_that_of_the_memory_and_only_changed_parameters_are_read_again(model, changes, again, reads):
    for stats, expected in measured(model, **changes):
        assert stats.squared_norm == expected > 0
        assert stats.finite
        assert sorted(reads) == sorted(again)
        reads.clear()


def test_nothing_is_measured_where_it_does_not_pay():
    model = nn.Linear(3, 2)
    writer, gradient = GradientWriter("a job", list(model.parameters())), FlatLayout(model).allocate()
    for measures, norms in ((True, {0: 6.0, 1: 2.0}), (False, {})):
        with writer.writing(gradient, measures=measures) as squared_norms:
            model(torch.ones(1, 3)).sum().backward()
        assert squared_norms == norms


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_noticed(value):
    class Broken(Wide):
        def forward(self, x):
            return super().forward(x) * value

    for stats, expected in measured(Broken):
        assert not stats.finite
        assert not expected < float("inf")
