"""Autograd hooks that write the gradients of a model into flat buffers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.tensors.flat_buffers import FlatBuffers
from paceline.tensors.squared_norms import copy_with_squared_norm


class GradientWriter:
    """Writer of gradients: autograd accumulates in views of flat buffers.

    Args:
        job: name of the job, for errors.
        parameters: trainable parameters, in the order of the flat buffers.

    Attributes:
        on_ready: called with the index of each parameter after autograd has added to its gradient; None for no call.
    """

    def __init__(self, job: str, parameters: Sequence[nn.Parameter]) -> None:
        self.on_ready: Callable[[int], object] | None = None
        self._job = job
        self._parameters = parameters
        self._measures = False
        self._squared_norms: dict[int, Tensor] = {}
        for i, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), i))

    @contextmanager
    def writing(self, gradient: FlatBuffers, *, measures: bool) -> Iterator[Mapping[int, Tensor]]:
        """Write all gradients of this context into `gradient`; parameters without a gradient get zeros.

        The value of the context is the squared norm of each parameter whose gradient is as it was copied, by index.

        Args:
            gradient: memory of the gradient.
            measures: whether to measure gradients as they are copied, which pays unless most of them change later.
        """
        stale, gradient.written = gradient.written, set()
        self._gradient = gradient
        self._measures = measures
        self._squared_norms = {}
        for parameter in self._parameters:
            parameter.grad = None
        try:
            yield self._squared_norms
        finally:
            for i in stale - gradient.written:  # no cost for parameters that are never used
                gradient.parameters[i].zero_()

    def check_written(self) -> None:
        """Check that the loss depends on the model.

        Raises:
            UsageError: no parameter has a gradient.
        """
        if not self._gradient.written:
            raise UsageError(
                f"job {self._job}: the loss does not depend on the model: after backward() none of its "
                f"{len(self._parameters)} trainable parameters has a gradient; compute the loss from the output of "
                "the model that step(model, batch) receives"
            )

    def _write(self, i: int) -> None:
        parameter, view, written = self._parameters[i], self._gradient.parameters[i], self._gradient.written
        if parameter.grad is view:  # autograd has added to the copy
            self._squared_norms.pop(i, None)
        else:
            assert parameter.grad is not None
            self._check(parameter.grad, is_first=i not in written)
            if self._measures:
                self._squared_norms[i] = copy_with_squared_norm(parameter.grad, view)
            else:
                view.copy_(parameter.grad)
            parameter.grad = view  # to copy is cheaper than to let autograd add to zeros
            written.add(i)
        if self.on_ready is not None:
            self.on_ready(i)

    def _check(self, gradient: Tensor, *, is_first: bool) -> None:
        if not is_first:
            raise UsageError(f"job {self._job}: step() replaced the gradients; do not call zero_grad() in it")
        if gradient.is_sparse:
            raise UsageError(
                f"job {self._job}: the model makes sparse gradients, which do not fit in a flat vector; "
                "use sparse=False"
            )


def _hook(writer: weakref.ref[GradientWriter], parameter: int) -> Callable[[Tensor], None]:
    """Return a hook with a weak reference: the garbage collector does not see cycles through autograd."""

    def write(_: Tensor) -> None:
        ours = writer()
        if ours is not None:
            ours._write(parameter)

    return write
