"""Requests of rank 0 to its server: the state during the run and after it, the end of the run, the end of rank 0."""

import os
import signal
import threading
from contextlib import suppress
from functools import partial

import pytest
import torch
from safetensors.torch import load
from torch import nn

from paceline.user_loop import server_process
from paceline.user_loop.frames import read_frame
from paceline.user_loop.optimizer_state import named_state
from paceline.user_loop.server_process import END, INTERRUPT, LAST_STATE, STATE, Requests

LIMIT_S = 10.0


class Rank0:
    """Rank 0, with the other ends of the pipes."""

    def __init__(self):
        self.model = nn.Linear(2, 1, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        (requests, self.write), (replies, written) = os.pipe(), os.pipe()
        self.replies = os.fdopen(replies, "rb")
        self.of_the_server = os.fdopen(requests, "rb"), os.fdopen(written, "wb")
        self.requests = Requests(*self.of_the_server, partial(named_state, self.optimizer, self.model))
        self.requests.start()

    def step(self):
        self.model(torch.ones(2)).backward()
        self.optimizer.step()

    def ask(self, request):
        os.write(self.write, request)

    def state(self):
        return load(read_frame(self.replies))

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
def signals(monkeypatch):
    sent = []
    monkeypatch.setattr(server_process.os, "kill", lambda *signal: sent.append(signal))
    return sent


@pytest.fixture
def rank_0(signals):
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
    rank_0.requests.end_run()
    assert "momentum_buffer weight" in rank_0.state()
    rank_0.ask(LAST_STATE)
    assert "momentum_buffer weight" in rank_0.state()


def test_an_interrupt_is_a_sigterm_until_the_run_has_ended(rank_0, signals):
    rank_0.ask(INTERRUPT + STATE)
    rank_0.state()
    assert signals == [(os.getpid(), signal.SIGTERM)]
    rank_0.requests.end_run()
    rank_0.ask(INTERRUPT + STATE)
    rank_0.state()
    assert len(signals) == 1


@pytest.mark.parametrize("has_ended", [False, True])
def test_the_end_of_rank_0_interrupts_a_run_that_has_not_ended(has_ended, rank_0, signals):
    if has_ended:
        rank_0.requests.end_run()
    rank_0.ask(END)
    rank_0.end()
    assert len(signals) == (not has_ended)


def test_a_rank_0_that_is_gone_needs_no_reply(rank_0):
    rank_0.ask(LAST_STATE + STATE)
    rank_0.state()
    rank_0.replies.close()
    reply = threading.Thread(target=rank_0.requests.end_run)
    reply.start()
    reply.join(LIMIT_S)
    assert not reply.is_alive()
