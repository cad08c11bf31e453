"""Cost of copying a gradient into its flat memory and of its squared norm, against adding a vector of its size.

The peer is the way of earlier versions: all is copied, and then all is read again. The gradient has the parameters of a
ResNet-18, of which 41 are vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from common import options, ratios, report, spread, timed
from paceline.tensors.flat_buffers import FlatLayout
from paceline.tensors.squared_norms import copy_with_squared_norm, squared_norm_of, sum_of_norms

BAR = 1.0


def main() -> None:
    parser = options(__doc__ or "", rounds=15)
    parser.add_argument("--repeats", type=int, default=5, help="repetitions timed together in a round")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    model = nn.ParameterList(torch.empty(shape) for shape in resnet18())
    flat = FlatLayout(model).allocate()
    gradients = [torch.randn(parameter.shape) for parameter in model]
    total, other = (torch.randn(len(flat.flat_parameters[0])) for _ in range(2))
    cases: dict[str, Callable[[], object]] = {
        "addition": partial(total.add_, other),
        "copy": partial(copy, gradients, flat.parameters),
        "copy, then norm": partial(copied_then_measured, gradients, flat.parameters),
        "copy with norm": partial(measured_as_copied, gradients, flat.parameters),
    }
    assert copied_then_measured(gradients, flat.parameters) == measured_as_copied(gradients, flat.parameters)
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for i in range(args.rounds + 1):
        for name, act in cases.items():
            each_s = timed(act, args.repeats)
            if i > 0:
                seconds[name].append(each_s)
    ratio = ratios(seconds["copy with norm"], seconds["copy, then norm"])
    results: dict[str, object] = {
        "bar": f"at most {BAR:g} of a copy and a norm after it, median of the ratios round by round",
        "seconds": {name: spread(each) for name, each in seconds.items()},
        "additions": {name: ratios(each, seconds["addition"]) for name, each in seconds.items() if name != "addition"},
        "against a copy and a norm after it": {**ratio, "meets_bar": ratio["median"] <= BAR},
    }
    report("gradient_copy", args, results)


def resnet18() -> list[tuple[int, ...]]:
    """Return the shapes of the parameters of a ResNet-18 for 1,000 classes."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width in (64, 128, 256, 512):
        for _ in range(2):
            shapes += [(width, channels, 3, 3), (width,), (width,), (width, width, 3, 3), (width,), (width,)]
            if channels != width:
                shapes += [(width, channels, 1, 1), (width,), (width,)]
            channels = width
    return [*shapes, (1000, 512), (1000,)]


def copy(gradients: list[Tensor], views: list[Tensor]) -> None:
    for gradient, view in zip(gradients, views, strict=True):
        view.copy_(gradient)


def copied_then_measured(gradients: list[Tensor], views: list[Tensor]) -> float:
    copy(gradients, views)
    return squared_norm_of(views)


def measured_as_copied(gradients: list[Tensor], views: list[Tensor]) -> float:
    return sum_of_norms([copy_with_squared_norm(*pair) for pair in zip(gradients, views, strict=True)])


if __name__ == "__main__":
    main()
