"""State of a user's optimizer under the names of its parameters, as it travels between rank 0 and the server."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.errors import RunError, UsageError
from paceline.server.parameter_server import ParameterServer
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)


def named_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the state of an optimizer on the CPU, under "key parameter".

    Raises:
        UsageError: a part of the state is not a tensor.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    >>> model(torch.ones(1)).backward()
    >>> optimizer.step()
    >>> named_state(optimizer, model)
    {'momentum_buffer weight': tensor([[1.]])}
    """
    state = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items() if parameter.requires_grad else ():
            if isinstance(value, Tensor):
                state[f"{key} {name}"] = value.detach().cpu().clone().contiguous()
            elif value is not None:
                raise UsageError(
                    f"{key} of {name} in the state of the optimizer is of type {type(value).__name__}, expected a "
                    "tensor: load a state that this version of torch has saved"
                )
    return state


def load_named_state(optimizer: torch.optim.Optimizer, model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Replace the state of an optimizer by what `named_state` has returned."""
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for both, value in state.items():
        key, _, name = both.partition(" ")
        parameter = parameters[name]
        optimizer.state[parameter][key] = value.to(parameter.device) if value.ndim else value


def state_reader(server: ParameterServer) -> Callable[[], dict[str, Tensor]]:
    """Return a function that reads the state of a server's optimizer from another thread, between two steps."""
    server.optimizer_lock = threading.Lock()

    def read() -> dict[str, Tensor]:
        with server.optimizer_lock:
            return named_state(server.optimizer, server.model)

    return read


class RemoteState:
    """State of the user's optimizer, which is at the server during the run.

    At rank 0 `state_dict()` has the state of the server; on the other ranks it has none.

    Args:
        optimizer: optimizer of the user.
        model: model of the user.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        self._optimizer = optimizer
        self._model = model
        self._fetch: Callable[[], dict[str, Tensor]] | None = None
        self._hooks: list[RemovableHandle] = []

    def start(self, fetch: Callable[[], dict[str, Tensor]] | None) -> None:
        """Free the state here, which has been sent.

        Args:
            fetch: returns the state of the server; None if this is not rank 0.
        """
        self._fetch = fetch
        self._optimizer.state.clear()
        ours = weakref.ref(self)
        self._hooks = [  # first that of `state_dict()`, see `close`
            self._optimizer.register_state_dict_pre_hook(lambda _: _call(ours, RemoteState._on_save)),
            self._optimizer.register_load_state_dict_pre_hook(lambda *_: _call(ours, RemoteState._on_load)),
        ]

    def end(self, state: Mapping[str, Tensor]) -> None:
        """Load the last state of the server."""
        self.close()
        load_named_state(self._optimizer, self._model, state)

    def close(self) -> None:
        """Leave the optimizer to the user; `state_dict()` on another rank than 0 still warns that there is no state."""
        for hook in self._hooks[self._fetch is None :]:
            hook.remove()

    def _on_save(self) -> None:
        if self._fetch is not None:
            load_named_state(self._optimizer, self._model, self._fetch())
        elif not self._optimizer.state:
            LOG.warning("state_dict() of the optimizer has no state on this rank: that of rank 0 has the server's")

    def _on_load(self) -> None:
        raise RunError(
            "optimizer.load_state_dict() during the run, when the state is at the server: load it before the first "
            "batch of run.loader"
        )


def _call(state: weakref.ref[RemoteState], method: Callable[[RemoteState], None]) -> None:
    alive = state()
    if alive is not None:
        method(alive)
