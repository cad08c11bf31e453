"""Watch over gradients that the loop changes between backward and step, as `clip_grad_norm_` does."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)
WATCHED_STEPS = 20


class ChangeWatch:
    """Watch that warns once of changed gradients; it ends after the first steps, because a loop does not vary.

    Each change in place raises the version counter of a tensor, which views of the same memory share.

    Args:
        parameters: trainable parameters of the model.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._steps = 0
        self._versions: dict[int, int] = {}  # version counter after the last backward pass, by owner of the memory
        self._hooks = [each.register_post_accumulate_grad_hook(self._on_accumulated) for each in parameters]

    def reset(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take the gradients as they are now, after a change that is none of the loop."""
        for parameter in parameters:
            self._on_accumulated(parameter)

    def on_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Warn if the gradients were changed since the last backward pass."""
        if not self._hooks:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        is_changed = any(
            self._versions.get(id(_owner(gradient)), gradient._version) != gradient._version for gradient in gradients
        )
        if is_changed:
            LOG.warning(
                "the loop changes the gradients between backward() and optimizer.step(), as clip_grad_norm_ does; this "
                "clips the gradient of one rank, and not the mean of all ranks: give clip_norm= to attach instead"
            )
        self._versions.clear()
        self._steps += 1
        if is_changed or self._steps == WATCHED_STEPS:
            self.close()

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _on_accumulated(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and self._hooks:
            self._versions[id(_owner(gradient))] = gradient._version


def _owner(gradient: Tensor) -> Tensor:
    return gradient if gradient._base is None else gradient._base
