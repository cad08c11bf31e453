import math
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.errors import UsageError
from paceline.jobs import (
    DBWNet,
    SmallNet,
    SoftmaxRegression,
    resnet18,
    resnet20,
    resnet32,
    resnet50,
    resnet101,
    resnet152,
    vgg16,
)
from selections import parametrize_few

PARAMETERS = [
    (partial(SoftmaxRegression, 64, 10), 650),
    (partial(SmallNet, 64, 32, 10), 2_410),
    (DBWNet, 21_840),
    (resnet20, 269_722),
    (resnet32, 464_154),
    (resnet18, 11_173_962),
    (resnet50, 23_705_252),
    (partial(resnet50, 1000, "imagenet"), 25_557_032),
    (resnet101, 44_549_160),
    (resnet152, 60_192_808),
    (vgg16, 138_357_544),
]
SHAPES = [
    (partial(SoftmaxRegression, 64, 3), (8, 8)),
    (partial(SmallNet, 64, 32, 3), (8, 8)),
    (partial(DBWNet, 3), (1, 28, 28)),
    (partial(resnet20, 3), (3, 32, 32)),
    (partial(resnet32, 3), (3, 32, 32)),
    (partial(resnet18, 3), (3, 8, 8)),
    (partial(resnet50, 3), (3, 8, 8)),
]
LARGE = [
    (partial(resnet50, 3, "imagenet"), 64),
    (partial(resnet101, 3, "small"), 32),
    (partial(resnet101, 3), 64),
    (partial(resnet152, 3, "small"), 32),
    (partial(resnet152, 3), 64),
    (partial(vgg16, 3, 32), 32),
    (partial(vgg16, 3, 64), 64),
]


@parametrize_few(("make_model", "parameters"), PARAMETERS, keep=4)
def test_has_the_published_number_of_parameters(make_model, parameters):
    with torch.device("meta"):
        model = make_model()
    assert sum(p.numel() for p in model.parameters()) == parameters


@parametrize_few(("make_model", "sample_shape"), SHAPES, keep=4)
def test_maps_a_batch_to_logits_and_every_parameter_learns(make_model, sample_shape):
    model = pickle.loads(pickle.dumps(make_model))()
    logits = model(torch.rand(2, *sample_shape))
    assert logits.shape == (2, 3)
    F.cross_entropy(logits, torch.tensor([0, 2])).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@parametrize_few("make_model", [vgg16, resnet101], keep=1)
def test_maps_the_images_of_imagenet_to_a_thousand_logits(make_model):
    with torch.device("meta"):
        assert make_model()(torch.empty(2, 3, 224, 224)).shape == (2, 1000)


@pytest.mark.parametrize(("make_model", "size"), LARGE)
@pytest.mark.slow
def test_a_step_of_a_large_model_lowers_the_loss_by_what_the_gradient_says(make_model, size):
    torch.manual_seed(0)
    model, images = make_model().double(), torch.rand(4, 3, size, size, dtype=torch.float64)
    labels = torch.tensor([0, 2, 1, 0])

    def loss_now():
        torch.manual_seed(1)  # the same units are dropped
        return F.cross_entropy(model(images), labels)

    before = loss_now()
    before.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
    rate = 1e-5 * before.item() / sum(gradient.square().sum().item() for gradient in gradients)
    torch.optim.SGD(model.parameters(), lr=rate).step()
    assert (before - loss_now()).item() == pytest.approx(1e-5 * before.item(), rel=0.1)


@pytest.mark.parametrize("image_size", [0, 28, 224.5])
def test_vgg_refuses_an_image_that_does_not_halve_five_times(image_size):
    with pytest.raises(UsageError, match=r"expected a (multiple of 32|whole number)"):
        vgg16(10, image_size)


def test_an_unknown_stem_is_refused():
    with pytest.raises(UsageError, match="stem='big', expected 'small' or 'imagenet'"):
        resnet50(stem="big")


def test_softmax_regression_starts_at_the_loss_of_a_uniform_guess():
    logits = SoftmaxRegression(64, 10)(torch.rand(5, 64))
    loss = F.cross_entropy(logits, torch.arange(5))
    assert loss.item() == pytest.approx(math.log(10))


def convolution(kernel, channels, out_channels):
    """Count the parameters of a convolution without bias and of the normalisation after it."""
    return kernel**2 * channels * out_channels + 2 * out_channels


@parametrize_few("classes", [10, 100], keep=1)
def test_resnet50_has_the_parameters_of_three_four_six_and_three_bottlenecks(classes):
    count, channels = convolution(3, 3, 64), 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        count += convolution(1, channels, 4 * width)  # the shortcut of the first block
        for _ in range(blocks):
            count += convolution(1, channels, width) + convolution(3, width, width) + convolution(1, width, 4 * width)
            channels = 4 * width
    count += (channels + 1) * classes
    with torch.device("meta"):
        model = resnet50(classes)
    assert sum(p.numel() for p in model.parameters()) == count


@parametrize_few(
    ("make_model", "size", "channels"),
    [(resnet20, 8, 64), (resnet18, 4, 512), (resnet32, 8, 64), (resnet50, 4, 2048)],
    keep=1,
)
def test_cifar_resnets_halve_the_image_twice_and_the_others_three_times(make_model, size, channels):
    with torch.device("meta"):
        features = nn.Sequential(*list(make_model())[:-3])(torch.rand(1, 3, 32, 32))
    assert features.shape == (1, channels, size, size)
