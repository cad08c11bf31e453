"""Parameters of a server that a standby follows: options of the loops, and the state at the beginning."""

import pytest
import torch
from torch import nn

from paceline.core.events import Apply
from paceline.engines.distributed.standby.followed_parameters import FollowedServer, first_state
from paceline.engines.distributed.transport.messages import FollowUpdate
from paceline.engines.distributed.transport.standby_messages import joined_events
from paceline.engines.distributed.transport.step_options import StepOptions
from paceline.errors import RunError
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.flat_buffers import FlatLayout
from tiny_jobs import tiny_job


def followed():
    """Return a server that is followed, and its layout."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    layout = FlatLayout(model)
    return ParameterServer(tiny_job(), model, layout, None), layout


def test_the_options_of_the_loops_are_those_of_the_step():
    server, layout = followed()
    mean = layout.allocate()
    for each in mean.parameters:
        each.fill_(1.0)
    before = torch.cat([each.reshape(-1).clone() for each in server.state.parameters])
    parameters = FollowedServer(server, layout)
    options = StepOptions((0.25,)).encode()
    message = FollowUpdate(events=joined_events([]), version=1, options=options, tensors={"mean": mean.memory})
    assert list(parameters.receive(message)) == []
    parameters.apply(Apply(version=1, gradients=(), lr_scale=1.0, reason=""))
    after = torch.cat([each.reshape(-1) for each in server.state.parameters])
    assert torch.allclose(before - after, torch.full_like(before, 0.25))


def test_another_state_at_the_beginning_is_refused():
    server, layout = followed()
    parameters = FollowedServer(server, layout)
    assert list(parameters.receive(FollowUpdate(events=joined_events([]), first=first_state(server), tensors={}))) == []
    other, _ = followed()
    with torch.no_grad():
        other.state.parameters[0].add_(1e-6)
    with pytest.raises(RunError, match="load a checkpoint of your own on all ranks"):
        list(parameters.receive(FollowUpdate(events=joined_events([]), first=first_state(other), tensors={})))
