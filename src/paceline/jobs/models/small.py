from torch import nn

from paceline.utils.argument_types import checked_types


@checked_types
class SoftmaxRegression(nn.Sequential):
    """Multinomial logistic regression: one linear layer on the flattened input.

    Maps ``[batch, ...]`` with ``features`` values per sample to logits ``[batch, classes]``. The parameters
    start at zero, so the first loss is ln(classes) for every seed; the problem is convex, so no start is better.

    Args:
        features: number of values per sample, >= 1.
        classes: number of classes, >= 1.
    """

    def __init__(self, features: int, classes: int) -> None:
        linear = nn.Linear(features, classes)
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
        super().__init__(nn.Flatten(), linear)


@checked_types
class SmallNet(nn.Sequential):
    """Network with one hidden layer of ReLU units.

    Maps ``[batch, ...]`` with ``features`` values per sample to logits ``[batch, classes]``.

    Args:
        features: number of values per sample, >= 1.
        hidden: number of hidden units, >= 1.
        classes: number of classes, >= 1.
    """

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))


@checked_types
class DBWNet(nn.Sequential):
    """Convolutional network of DBW's MNIST experiments: 21,840 parameters.

    Maps images ``[batch, 1, 28, 28]`` to logits ``[batch, classes]``.

    Args:
        classes: number of classes, >= 1.

    Reference: Xu, Neglia, Sebastianelli, "Dynamic Backup Workers for Parallel Machine Learning", 2020,
    section 4: two convolutional layers with 5x5 filters and two fully connected layers. The paper gives no
    widths: 10 and 20 channels and 50 hidden units are taken from PyTorch's first MNIST example, with its 2x2
    max-pooling and without its dropout.
    """

    def __init__(self, classes: int = 10) -> None:
        first = [nn.Conv2d(1, 10, kernel_size=5), nn.MaxPool2d(2), nn.ReLU()]
        second = [nn.Conv2d(10, 20, kernel_size=5), nn.MaxPool2d(2), nn.ReLU()]
        classifier = [nn.Flatten(), nn.Linear(20 * 4 * 4, 50), nn.ReLU(), nn.Linear(50, classes)]
        super().__init__(*[*first, *second, *classifier])
