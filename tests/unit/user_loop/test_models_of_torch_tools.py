"""Attached models that tools of torch have changed: every mode equals the plain loop on minibatches that are alike."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from allreduce_loops import AllReduceLoops
from attached_threads import AttachedThreads
from selections import each_value_once, parametrize_few

EXACT = 1e-12
STEPS, RANKS, BATCH = 6, 2, 8
X = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(0)).double()
Y = X[:, :1] - X[:, 1:2]
MODES = [("bsp", AttachedThreads), ("bsp + local_steps(H=2)", AttachedThreads), ("all_reduce", AllReduceLoops)]


class Named(nn.Module):
    """Model whose layers have names of methods of a module."""

    def __init__(self, network):
        super().__init__()
        names = ["train", "state_dict", "eval", "parameters", "to"]
        self._modules.update(zip(names, [*network, nn.Linear(1, 1).double()], strict=True))

    def forward(self, x):
        for layer in self._modules.values():
            x = layer(x)
        return x


def network():
    torch.manual_seed(0)
    layers = [nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)]
    return nn.Sequential(*layers).double()


def changed_first(change):
    def make():
        model = network()
        change(model[0])
        return model

    return make


MODELS = {
    "plain": network,
    "spectral_norm": changed_first(nn.utils.spectral_norm),
    "spectral_norm as a parametrization": changed_first(parametrizations.spectral_norm),
    "weight_norm as a parametrization": changed_first(parametrizations.weight_norm),
    "orthogonal": changed_first(parametrizations.orthogonal),
    "names of methods": lambda: Named(network()),
}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of the older spectral_norm


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def tensors_of(model):
    """Return the tensors of a model, whose methods its layers may hide."""
    named = list(nn.Module.named_parameters(model)) if isinstance(model, Named) else list(model.named_parameters())
    return [each for _, each in (*named, *model.named_buffers())]


def sgd(model):
    parameters = [each for each in tensors_of(model) if isinstance(each, nn.Parameter)]
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@parametrize_few(("mode", "make"), each_value_once(MODES, list(MODELS.values())), keep=1)
def test_the_model_and_its_average_are_those_of_the_plain_loop(mode, make):
    protocol, kind = mode
    averages = {}

    def train(model, optimizer, batches):
        average = averages[model] = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        for x, y in batches:
            step(model, optimizer, x, y)
            average.update_parameters(model)

    def loop(run, model, optimizer):
        for _ in run.epochs(1):
            train(model, optimizer, run.loader)

    def parts():
        model = make()
        data = TensorDataset(X.repeat(STEPS * RANKS, 1), Y.repeat(STEPS * RANKS, 1))
        return model, sgd(model), DataLoader(data, batch_size=BATCH)

    alone = make()
    train(alone, sgd(alone), [(X, Y)] * STEPS)
    ranks = kind(RANKS, parts, protocol)
    assert ranks.run(loop) == [None] * RANKS
    for model, _, _ in ranks.parts:
        for first, second in [(model, alone), (averages[model], averages[alone])]:
            for ours, theirs in zip(tensors_of(first), tensors_of(second), strict=True):
                assert (ours - theirs).abs().max() < EXACT
