"""VGG networks of Simonyan, Zisserman, "Very Deep Convolutional Networks", ICLR 2015."""

from torch import nn

from paceline.errors import UsageError
from paceline.utils.argument_types import checked_types

STAGES = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))  # convolutions, channels
HALVINGS = len(STAGES)


@checked_types
class VGG(nn.Sequential):
    """VGG network: stages of 3x3 convolutions with max-pooling, and three fully connected layers with dropout 0.5.

    Maps images ``[batch, 3, image_size, image_size]`` to logits ``[batch, classes]``.

    Args:
        classes: number of classes, >= 1.
        image_size: height and width in pixels, a multiple of 32.

    Raises:
        UsageError: the image size is not a multiple of 32.
    """

    def __init__(self, classes: int, image_size: int) -> None:
        size, rest = divmod(image_size, 2**HALVINGS)
        if rest or size < 1:
            raise UsageError(f"image_size = {image_size!r}, expected a multiple of {2**HALVINGS}: five stages halve it")
        layers: list[nn.Module] = []
        channels = 3
        for depth, out_channels in STAGES:
            for _ in range(depth):
                layers += [nn.Conv2d(channels, out_channels, kernel_size=3, padding=1), nn.ReLU()]
                channels = out_channels
            layers.append(nn.MaxPool2d(2))
        hidden = 4096
        layers += [nn.Flatten(), nn.Linear(channels * size**2, hidden), nn.ReLU(), nn.Dropout()]
        layers += [nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(), nn.Linear(hidden, classes)]
        super().__init__(*layers)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                assert module.bias is not None
                nn.init.zeros_(module.bias)


@checked_types
def vgg16(classes: int = 1000, image_size: int = 224) -> VGG:
    """Return VGG-16, 138M parameters; with image_size=32, for CIFAR, 34M.

    Args:
        classes: number of classes, >= 1.
        image_size: height and width in pixels, a multiple of 32.

    Reference: Simonyan and Zisserman 2015, table 1, column D; a model of DC-S3GD's table I (Rigazzi 2019).
    Differs from the paper: weights are initialised as by He et al. 2015 (normal, gain of ReLU), with which 16 layers
    learn from the start; the paper takes them from a shallower network that was trained before.
    """
    return VGG(classes, image_size)
