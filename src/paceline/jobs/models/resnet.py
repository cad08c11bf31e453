"""Residual networks for 32x32 images, after He, Zhang, Ren, Sun, "Deep Residual Learning", CVPR 2016."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn import functional as F

Shortcut = Callable[[int, int], nn.Module]
"""Builds what joins a ``channels`` input to an ``out_channels`` output of half its height and width."""


def _conv3x3(channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)


class _ZeroPadding(nn.Module):
    """Option A of the paper: every second pixel, and zeros for the new channels; no parameters."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.new_channels = out_channels - channels

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.new_channels))


def _projection(channels: int, out_channels: int) -> nn.Module:
    """Option B of the paper: a 1x1 convolution of stride 2."""
    convolution = nn.Conv2d(channels, out_channels, kernel_size=1, stride=2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out_channels))


class _BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut; a block that widens also halves height and width."""

    def __init__(self, channels: int, out_channels: int, shortcut: Shortcut) -> None:
        super().__init__()
        widens = out_channels != channels
        self.residual = nn.Sequential(
            *(_conv3x3(channels, out_channels, stride=2 if widens else 1), nn.BatchNorm2d(out_channels)),
            nn.ReLU(),
            *(_conv3x3(out_channels, out_channels), nn.BatchNorm2d(out_channels)),
        )
        self.shortcut = shortcut(channels, out_channels) if widens else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.residual(x) + self.shortcut(x))


class ResNet(nn.Sequential):
    """A residual network of basic blocks, with the stem for small images: 3x3, stride 1, no max-pooling.

    Maps images ``[batch, 3, height, width]`` to logits ``[batch, classes]``. Stage i has ``blocks[i]`` blocks
    of ``width * 2**i`` channels.

    Reference: He et al. 2016, figure 3 and section 4.2; convolutions are initialised as in their reference
    [13] (normal, gain of ReLU).
    """

    def __init__(self, blocks: Sequence[int], width: int, classes: int, shortcut: Shortcut) -> None:
        layers: list[nn.Module] = [_conv3x3(3, width), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
        for stage, depth in enumerate(blocks):
            for _ in range(depth):
                layers.append(_BasicBlock(channels, width * 2**stage, shortcut))
                channels = width * 2**stage
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def resnet20(classes: int = 10) -> ResNet:
    """Return the CIFAR ResNet-20: 6n+2 layers with n = 3 and option A shortcuts, 0.27M parameters.

    Reference: He et al. 2016, section 4.2.
    """
    return ResNet([3, 3, 3], width=16, classes=classes, shortcut=_ZeroPadding)


def resnet32(classes: int = 10) -> ResNet:
    """Return the CIFAR ResNet-32: 6n+2 layers with n = 5 and option A shortcuts, 0.46M parameters.

    Reference: He et al. 2016, section 4.2; the model of Sync-Switch's setups 1 and 3.
    """
    return ResNet([5, 5, 5], width=16, classes=classes, shortcut=_ZeroPadding)


def resnet18(classes: int = 10) -> ResNet:
    """Return ImageNet's ResNet-18 with the stem for small images, 11.2M parameters.

    Reference: He et al. 2016, table 1, option B shortcuts; the model of DBW's CIFAR-10 experiments.
    Differs from the paper: the stem is 3x3 of stride 1 without max-pooling, as is usual for 32x32 images.
    """
    return ResNet([2, 2, 2, 2], width=64, classes=classes, shortcut=_projection)
