"""A worker that is several processes: each computes the gradient of its share of the minibatch."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple, Protocol

from paceline.vectors import Vectors


class Part(NamedTuple):
    """What was measured of the gradient of some samples.

    Attributes:
        loss: their mean.
        samples: how many they are.
        mean_square: mean over the samples of the squared norm of their microbatch's gradient.
        microbatches: in which they were computed; 0 where nothing is measured of each.
    """

    loss: float
    samples: int
    mean_square: float
    microbatches: int


class Sharing(Protocol):
    """Joins the gradients that the processes of one worker have computed.

    Attributes:
        place: of this process among them.
        size: how many they are.
    """

    place: int
    size: int

    @abstractmethod
    def add_up(self, gradient: Vectors, part: Part) -> Part:
        """Make of the gradient of this process that of all of them, and return what was measured of the whole.

        Raises:
            Interrupted: the work is to be abandoned.
        """
