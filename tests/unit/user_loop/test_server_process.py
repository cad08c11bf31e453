"""Requests of rank 0 to its server: the state during the run and after it, the end of the run, the end of rank 0."""

import os
import threading
from contextlib import suppress
from functools import partial

import pytest
import torch
from safetensors.torch import load
from torch import nn

from machine_speed import scaled
from paceline.core.events import Outcome
from paceline.engines.distributed import End
from paceline.user_loop.server.frames import frame, from_json, read_frame, to_json
from paceline.user_loop.server.optimizer_state import named_state
from paceline.user_loop.server.server_process import END, END_RUN, LAST_STATE, OF_END, OF_STATE, STATE, Requests

LIMIT_S = scaled(10.0)
DONE = End("updates", "3 updates made in caf\udce9", updates=3)


class Rank0:
    """Rank 0, with the other ends of the pipes."""

    def __init__(self):
        self.model = nn.Linear(2, 1, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        (requests, self.write), (replies, written) = os.pipe(), os.pipe()
        self.replies = os.fdopen(replies, "rb")
        self.of_the_server = os.fdopen(requests, "rb"), os.fdopen(written, "wb")
        self.ended = []
        state = partial(named_state, self.optimizer, self.model)
        self.requests = Requests(*self.of_the_server, lambda *end: self.ended.append(end), state, has_successor=False)
        self.requests.start()

    def step(self):
        self.model(torch.ones(2)).backward()
        self.optimizer.step()

    def ask(self, request):
        os.write(self.write, request)

    def state(self):
        assert read_frame(self.replies) == OF_STATE
        return load(read_frame(self.replies))

    def run_end(self):
        assert read_frame(self.replies) == OF_END
        return from_json(read_frame(self.replies), End)

    def end(self):
        self.requests.join(LIMIT_S)
        assert not self.requests.is_alive()

    def close(self):
        os.close(self.write)
        self.end()
        for file in (*self.of_the_server, self.replies):
            with suppress(BrokenPipeError):
                file.close()


@pytest.fixture
def rank_0():
    rank = Rank0()
    yield rank
    rank.close()


def test_the_state_is_that_of_the_last_step(rank_0):
    rank_0.ask(STATE)
    assert rank_0.state() == {}
    rank_0.step()
    rank_0.ask(STATE)
    assert rank_0.state()["momentum_buffer weight"].tolist() == [[1.0, 1.0]]


def test_the_last_state_comes_after_the_end_of_the_run(rank_0):
    rank_0.ask(LAST_STATE + STATE)
    assert rank_0.state() == {}  # STATE: the other one waits
    rank_0.step()
    rank_0.requests.on_end(DONE)
    assert rank_0.run_end() == DONE
    assert "momentum_buffer weight" in rank_0.state()
    rank_0.ask(LAST_STATE)
    assert "momentum_buffer weight" in rank_0.state()


def test_rank_0_ends_the_run_with_an_outcome_and_a_reason(rank_0):
    end = (Outcome.FAILED, "cannot read caf\udce9")
    rank_0.ask(END_RUN + frame(to_json(end)) + END)
    rank_0.end()
    assert rank_0.ended == [end]


def test_the_death_of_rank_0_is_a_failure(rank_0):
    os.close(rank_0.write)
    rank_0.end()
    rank_0.write = os.open(os.devnull, os.O_WRONLY)
    assert rank_0.ended == [(Outcome.FAILED, "rank 0 is gone: its process ended within the run")]


def test_a_rank_0_that_is_gone_needs_no_reply(rank_0):
    rank_0.ask(LAST_STATE + STATE)
    rank_0.state()
    rank_0.replies.close()
    reply = threading.Thread(target=rank_0.requests.on_end, args=[DONE])
    reply.start()
    reply.join(LIMIT_S)
    assert not reply.is_alive()
