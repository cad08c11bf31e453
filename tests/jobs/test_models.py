import math
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.jobs.models import DBWNet, SmallNet, SoftmaxRegression, resnet18, resnet20, resnet32, resnet50

PARAMETERS = [
    (partial(SoftmaxRegression, 64, 10), 650),
    (partial(SmallNet, 64, 32, 10), 2_410),
    (DBWNet, 21_840),
    (resnet20, 269_722),
    (resnet32, 464_154),
    (resnet18, 11_173_962),
    (resnet50, 23_705_252),
]
SHAPES = [
    (partial(SoftmaxRegression, 64, 3), (8, 8)),
    (partial(SmallNet, 64, 32, 3), (8, 8)),
    (partial(DBWNet, 3), (1, 28, 28)),
    (partial(resnet20, 3), (3, 32, 32)),
    (partial(resnet32, 3), (3, 32, 32)),
    (partial(resnet18, 3), (3, 32, 32)),
    (partial(resnet50, 3), (3, 32, 32)),
]


@pytest.mark.parametrize(("make_model", "parameters"), PARAMETERS)
def test_has_the_published_number_of_parameters(make_model, parameters):
    assert sum(p.numel() for p in make_model().parameters()) == parameters


@pytest.mark.parametrize(("make_model", "sample_shape"), SHAPES)
def test_maps_a_batch_to_logits_and_every_parameter_learns(make_model, sample_shape):
    model = pickle.loads(pickle.dumps(make_model))()
    logits = model(torch.rand(2, *sample_shape))
    assert logits.shape == (2, 3)
    F.cross_entropy(logits, torch.tensor([0, 2])).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_softmax_regression_starts_at_the_loss_of_a_uniform_guess():
    logits = SoftmaxRegression(64, 10)(torch.rand(5, 64))
    loss = F.cross_entropy(logits, torch.arange(5))
    assert loss.item() == pytest.approx(math.log(10))


def convolution(kernel, channels, out_channels):
    """Count the parameters of a convolution without bias and of the normalisation after it."""
    return kernel**2 * channels * out_channels + 2 * out_channels


@pytest.mark.parametrize("classes", [10, 100])
def test_resnet50_has_the_parameters_of_three_four_six_and_three_bottlenecks(classes):
    count, channels = convolution(3, 3, 64), 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        count += convolution(1, channels, 4 * width)  # the shortcut of the first block
        for _ in range(blocks):
            count += convolution(1, channels, width) + convolution(3, width, width) + convolution(1, width, 4 * width)
            channels = 4 * width
    count += (channels + 1) * classes
    assert sum(p.numel() for p in resnet50(classes).parameters()) == count


def test_cifar_resnets_halve_the_image_twice_and_the_others_three_times():
    image = torch.rand(1, 3, 32, 32)
    for make_model, size, channels in [
        (resnet20, 8, 64),
        (resnet32, 8, 64),
        (resnet18, 4, 512),
        (resnet50, 4, 2048),
    ]:
        features = nn.Sequential(*list(make_model())[:-3])(image)
        assert features.shape == (1, channels, size, size)
