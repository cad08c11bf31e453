"""Residual networks of He, Zhang, Ren, Sun, "Deep Residual Learning", CVPR 2016."""

from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import UsageError
from paceline.utils.argument_types import checked_types

Stem = Literal["small", "imagenet"]
EXPANSION = 4  # ratio of a bottleneck's channels to those of its 3x3 convolution
Branch = Callable[[int, int, int], nn.Module]
"""Builder of a module that maps ``channels`` to ``out_channels`` and divides height and width by ``stride``."""


def _conv3x3(channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)


def _conv1x1(channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, out_channels, kernel_size=1, stride=stride, bias=False)


class _ZeroPadding(nn.Module):
    """Option A of the paper: subsampling by the stride and zero padding of channels, without parameters."""

    def __init__(self, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.new_channels = out_channels - channels
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))


def _projection(channels: int, out_channels: int, stride: int) -> nn.Module:
    """Return option B of the paper: a 1x1 convolution."""
    return nn.Sequential(_conv1x1(channels, out_channels, stride), nn.BatchNorm2d(out_channels))


def _basic(channels: int, out_channels: int, stride: int) -> nn.Module:
    """Return two 3x3 convolutions."""
    first = [_conv3x3(channels, out_channels, stride), nn.BatchNorm2d(out_channels), nn.ReLU()]
    second = [_conv3x3(out_channels, out_channels), nn.BatchNorm2d(out_channels)]
    return nn.Sequential(*[*first, *second])


def _bottleneck(channels: int, out_channels: int, stride: int) -> nn.Module:
    """Return a bottleneck: a 3x3 convolution with a quarter of the channels, between two 1x1 convolutions."""
    inner = out_channels // EXPANSION
    narrowing = [_conv1x1(channels, inner), nn.BatchNorm2d(inner), nn.ReLU()]
    middle = [_conv3x3(inner, inner, stride), nn.BatchNorm2d(inner), nn.ReLU()]
    widening = [_conv1x1(inner, out_channels), nn.BatchNorm2d(out_channels)]
    return nn.Sequential(*[*narrowing, *middle, *widening])


class _Block(nn.Module):
    """Residual block; its shortcut is the identity unless the number of channels changes."""

    def __init__(self, channels: int, out_channels: int, stride: int, residual: Branch, shortcut: Branch) -> None:
        super().__init__()
        self.residual = residual(channels, out_channels, stride)
        self.shortcut = shortcut(channels, out_channels, stride) if out_channels != channels else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.residual(x) + self.shortcut(x))


def _stem(stem: Stem, width: int) -> list[nn.Module]:
    if stem == "small":
        return [_conv3x3(3, width), nn.BatchNorm2d(width), nn.ReLU()]
    if stem != "imagenet":
        raise UsageError(f"stem = {stem!r}, expected 'small' or 'imagenet'")
    convolution = nn.Conv2d(3, width, kernel_size=7, stride=2, padding=3, bias=False)
    return [convolution, nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(kernel_size=3, stride=2, padding=1)]


@checked_types
class ResNet(nn.Sequential):
    """Residual network.

    Maps images ``[batch, 3, height, width]`` to logits ``[batch, classes]``. Stage i has ``blocks[i]`` blocks of
    ``width * 2**i`` channels, four times as many for bottlenecks; each stage after the first halves height and width.
    The stem for small images is a 3x3 convolution of stride 1; that of ImageNet, 7x7 of stride 2 with max-pooling,
    divides height and width by 4.

    Args:
        blocks: number of blocks of each stage, each >= 1.
        width: number of channels of the first stage, >= 1.
        classes: number of classes, >= 1.
        shortcut: builder of the shortcut where the number of channels changes.
        bottlenecks: whether a block is a bottleneck.
        stem: first layers: "small" for 32x32 images, or "imagenet".

    Reference: He et al. 2016, figures 3 and 5 and section 4.2; convolutions are initialised as in their reference
    [13] (normal, gain of ReLU).
    """

    def __init__(
        self,
        blocks: Sequence[int],
        width: int,
        classes: int,
        shortcut: Branch,
        bottlenecks: bool = False,
        stem: Stem = "small",
    ) -> None:
        layers = _stem(stem, width)
        residual, expansion = (_bottleneck, EXPANSION) if bottlenecks else (_basic, 1)
        channels = width
        for stage, depth in enumerate(blocks):
            out_channels = width * 2**stage * expansion
            for block in range(depth):
                stride = 2 if stage and not block else 1
                layers.append(_Block(channels, out_channels, stride, residual, shortcut))
                channels = out_channels
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
        super().__init__(*layers)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


@checked_types
def resnet20(classes: int = 10) -> ResNet:
    """Return the CIFAR ResNet-20: 6n+2 layers with n = 3 and option A shortcuts, 0.27M parameters.

    Args:
        classes: number of classes, >= 1.

    Reference: He et al. 2016, section 4.2.
    """
    return ResNet([3, 3, 3], width=16, classes=classes, shortcut=_ZeroPadding)


@checked_types
def resnet32(classes: int = 10) -> ResNet:
    """Return the CIFAR ResNet-32: 6n+2 layers with n = 5 and option A shortcuts, 0.46M parameters.

    Args:
        classes: number of classes, >= 1.

    Reference: He et al. 2016, section 4.2; the model of Sync-Switch's setups 1 and 3.
    """
    return ResNet([5, 5, 5], width=16, classes=classes, shortcut=_ZeroPadding)


@checked_types
def resnet18(classes: int = 10) -> ResNet:
    """Return ImageNet's ResNet-18 with the stem for small images, 11.2M parameters.

    Args:
        classes: number of classes, >= 1.

    Reference: He et al. 2016, table 1, option B shortcuts; the model of DBW's CIFAR-10 experiments.
    Differs from the paper: the stem is 3x3 of stride 1 without max-pooling, as is common for 32x32 images.
    """
    return ResNet([2, 2, 2, 2], width=64, classes=classes, shortcut=_projection)


@checked_types
def resnet50(classes: int = 100, stem: Stem = "small") -> ResNet:
    """Return ImageNet's ResNet-50: bottlenecks, 23.7M parameters for 100 classes of small images.

    Args:
        classes: number of classes, >= 1.
        stem: first layers: "small" for 32x32 images, or "imagenet".

    Reference: He et al. 2016, table 1, option B shortcuts; the model of Sync-Switch's set-up 2, which took it from
    Tensor2Tensor (Vaswani et al. 2018): as there, the stride of a stage is that of its first 3x3 convolution.
    Differs from both: the stem is 3x3 of stride 1 without max-pooling, as is common for 32x32 images, unless
    stem="imagenet" is given. Sync-Switch does not describe its stem.
    """
    return ResNet([3, 4, 6, 3], width=64, classes=classes, shortcut=_projection, bottlenecks=True, stem=stem)


@checked_types
def resnet101(classes: int = 1000, stem: Stem = "imagenet") -> ResNet:
    """Return ImageNet's ResNet-101: bottlenecks, 44.5M parameters; for 32x32 images give stem="small".

    Args:
        classes: number of classes, >= 1.
        stem: first layers: "small" for 32x32 images, or "imagenet".

    Reference: He et al. 2016, table 1, option B shortcuts; a model of DC-S3GD's table I (Rigazzi 2019).
    Differs from the paper: the stride of a stage is that of its first 3x3 convolution, see `resnet50`.
    """
    return ResNet([3, 4, 23, 3], width=64, classes=classes, shortcut=_projection, bottlenecks=True, stem=stem)


@checked_types
def resnet152(classes: int = 1000, stem: Stem = "imagenet") -> ResNet:
    """Return ImageNet's ResNet-152: bottlenecks, 60.2M parameters; for 32x32 images give stem="small".

    Args:
        classes: number of classes, >= 1.
        stem: first layers: "small" for 32x32 images, or "imagenet".

    Reference: He et al. 2016, table 1, option B shortcuts; a model of DC-S3GD's table I (Rigazzi 2019).
    Differs from the paper: the stride of a stage is that of its first 3x3 convolution, see `resnet50`.
    """
    return ResNet([3, 8, 36, 3], width=64, classes=classes, shortcut=_projection, bottlenecks=True, stem=stem)
