"""The gradient of a loop is measured as it is handed in."""

import torch
from torch import nn

from attached_threads import AttachedThreads
from loop_parts import loss_of, make_parts
from paceline.core.records import GradientArrived
from paceline.tensors.flat_buffers import FlatLayout
from paceline.tensors.squared_norms import PIECE, squared_norm
from paceline.user_loop.hooks.loop_tensors import hand_in
from paceline.user_loop.worker.exchange import LoopTask
from paceline.worker import replica


def test_the_norm_of_each_gradient_that_is_handed_in_is_that_of_the_memory():
    model = nn.Sequential(nn.Linear(3, PIECE), nn.Linear(PIECE, 1)).requires_grad_()
    unused, wide, *_ = model.parameters()
    model(torch.randn(2, 3)).sum().backward()
    unused.grad = None
    gradient = FlatLayout(model).allocate()
    task = LoopTask(minibatch=None, upcoming=(), model=model, gradient=gradient, progress=None, check=None, step=0)
    norms = hand_in(task, [*model.parameters()], [])
    assert set(norms) == gradient.written == {1, 2, 3}
    assert all(torch.equal(norm, squared_norm(gradient.parameters[i])) for i, norm in norms.items())
    assert norms[1] > 0
    assert wide.grad is None


def test_a_gradient_of_a_loop_is_read_no_second_time(network, data, monkeypatch):
    read = []
    monkeypatch.setattr(replica, "squared_norm", lambda view: read.append(view) or squared_norm(view))

    def loop(run, model, optimizer):
        norms = []
        for _ in run.epochs(1):
            for batch in run.loader:
                loss_of(model, *batch).backward()
                norms.append(sum(float(each.grad.square().sum()) for each in model.parameters() if each.requires_grad))
                optimizer.step()
        return norms

    ranks = AttachedThreads(1, make_parts(network, data), "bsp")
    [norms] = ranks.run(loop)
    arrived = [each.squared_norm for each in ranks.server.result.history.of(GradientArrived)]
    assert torch.allclose(torch.tensor(arrived), torch.tensor(norms))
    assert read == []
