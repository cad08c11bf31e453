"""The door of rank 0: who may come in, and what is left of those who have gone."""

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from unittest.mock import patch

import psutil
import pytest
import torch

import paceline as pl
from paceline.engines.distributed.allreduce import elastic_group as rings
from paceline.engines.distributed.allreduce.elastic_group import ElasticGroup
from paceline.engines.distributed.rendezvous import rendezvous as places
from paceline.engines.distributed.rendezvous.acceptor import Acceptor, PeerJoined, PeerLost, PeerRejected
from paceline.engines.distributed.rendezvous.handshake import RunOver, apply_for, notice_of_end
from paceline.engines.distributed.rendezvous.rendezvous import Rendezvous
from paceline.engines.distributed.transport import connection as lines
from paceline.engines.distributed.transport import keepalive as silence
from paceline.engines.distributed.transport.connection import SHORT_BYTES, Connection, ConnectionLost
from paceline.engines.distributed.transport.event_queue import EventQueue
from paceline.engines.distributed.transport.messages import Text

TOKEN = "a secret"
DEEP = {"layers": {f"layers_of_a_deep_network.{i}": "Linear(in_features=1, out_features=1)" for i in range(20_000)}}


@contextmanager
def door(agreement=None, processes=2):
    """Yield a place with a door, and where is told who comes and goes."""
    with whole_door(agreement, processes) as (made, place, inbox):
        assert made is not None
        yield place, inbox


@contextmanager
def whole_door(agreement=None, processes=2):
    """Yield a door, too."""
    meeting = Rendezvous.on("127.0.0.1", silence_s=60)
    inbox = EventQueue()
    made = Acceptor(meeting, TOKEN, agreement or {}, [None] * processes, inbox)
    try:
        yield made, meeting.place, inbox
    finally:
        assert made.close()
        inbox.close()


def line_to(place):
    store = place.client()
    ticket = int(store.add(places.TICKETS, 1))
    store.set(places._here(ticket), "here")
    return Connection(store, places._pair_key(ticket), 1, place.device, 60)


def hello(worker=0, agreement=None):
    return {"name": "worker 0", "worker": worker, "agreement": agreement or {}}


def test_an_agreement_may_be_long():
    with door(DEEP) as (place, inbox), closing(line_to(place)) as line:
        apply_for(line, TOKEN, hello(agreement=DEEP))
        assert isinstance(inbox.get(), PeerJoined)


END = {"outcome": "updates", "reason": "5 updates made", "time_s": 1.0}


def test_a_process_at_the_door_is_told_that_the_run_is_over():
    with whole_door() as (made, place, inbox), closing(line_to(place)) as line:
        made.announce_end(END)
        with pytest.raises(RunOver, match="5 updates made") as over:
            apply_for(line, TOKEN, hello())
        assert over.value.end == END
        assert inbox.is_empty


@pytest.fixture
def late(monkeypatch):
    """The settings of a process that comes back."""
    named = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "PACELINE_TOKEN": TOKEN}
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    return pl.Torchrun(start_timeout_s=5.0)


def test_a_process_that_comes_later_reads_that_the_run_is_over(late):
    with whole_door() as (made, place, _):
        made.announce_end(END)
        with pytest.raises(RunOver) as over:
            places.enter(place, late)
        assert over.value.end == END
        assert int(place.client().add(places.TICKETS, 0)) == 0


@pytest.mark.parametrize("notice", ["no JSON", "[]", "{}", notice_of_end(END, "another secret")])
def test_a_notice_by_somebody_who_does_not_know_the_token_is_not_believed(notice, late):
    with whole_door() as (_, place, _):
        place.client().set(places.OVER, notice)
        _, line = places.enter(place, late)
        line.close()


def test_a_long_difference_is_told_in_short():
    with door(DEEP) as (place, inbox), closing(line_to(place)) as line:
        with pytest.raises(pl.UsageError, match="and 19990 more") as refused:
            apply_for(line, TOKEN, hello(agreement={"layers": {}}))
        assert len(str(refused.value)) < 1500
        line.close()
        assert inbox.get() == PeerRejected(str(refused.value))


def test_nobody_may_say_much_before_it_has_proved_who_it_is():
    with door() as (place, _), closing(line_to(place)) as line:
        line.receive()
        line.send(Text(SHORT_BYTES + 1), [torch.zeros(SHORT_BYTES + 1, dtype=torch.uint8)])
        with pytest.raises(ConnectionLost):
            line.receive()


def test_nothing_is_told_to_somebody_who_does_not_know_the_token():
    heard = []
    with door(DEEP) as (place, _), closing(line_to(place)) as line:
        line.tell = heard.append
        asked = threading.Thread(target=_apply_in_vain, args=[line])
        asked.start()
        while not heard:
            pass
        assert heard[0].keys() == {"proof", "challenge"}
        line.close()
        asked.join()


def _apply_in_vain(line):
    with pytest.raises(ConnectionLost):
        apply_for(line, TOKEN, hello(agreement=DEEP))


def test_nothing_is_left_of_a_process_that_has_gone():
    def come_and_go(times):
        for _ in range(times):
            with closing(line_to(place)) as line:
                apply_for(line, TOKEN, hello())
                assert isinstance(inbox.get(), PeerJoined)
            assert isinstance(inbox.get(), PeerLost)

    with door() as (place, inbox):
        come_and_go(3)
        before = _open_files(), _threads()
        come_and_go(20)
        now = _open_files(), _threads()
        assert all(later <= earlier + 4 for earlier, later in zip(before, now, strict=True)), (before, now)


def _open_files():
    return len(os.listdir("/dev/fd"))


def _threads():
    """Return how many threads this process has, those that gloo has started included."""
    return psutil.Process().num_threads()


def test_a_number_that_is_nobodys_is_refused_with_what_to_type():
    with door() as (place, inbox), closing(line_to(place)) as line:
        with pytest.raises(pl.UsageError, match=r"there is no worker 5, .*RANK") as refused:
            apply_for(line, TOKEN, hello(worker=5))
        line.close()
        assert inbox.get() == PeerRejected(str(refused.value))


def test_another_number_of_processes_is_refused_with_what_to_type():
    said = r"WORLD_SIZE 3, now 4; seed 1, now 2: to join a run, give the WORLD_SIZE that all others have and the RANK"
    with (
        door({"WORLD_SIZE": 3, "seed": 1}) as (place, _),
        closing(line_to(place)) as line,
        pytest.raises(pl.UsageError, match=said),
    ):
        apply_for(line, TOKEN, hello(agreement={"WORLD_SIZE": 4, "seed": 2}))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_only_the_connections_of_lines_and_rings_end_when_their_host_is_silent(host):
    meeting = Rendezvous.on(host, silence_s=60)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        users = [socket.create_connection(listener.getsockname()), listener.accept()[0]]
        clients = [meeting.place.client() for _ in range(2)]
        with patch.object(lines, "sockets", set), patch.object(rings, "sockets", set):  # as if all of them were new
            ours = _together(lambda side: Connection(clients[side], "key", side, meeting.place.device, 60), 2)
            of_lines = _limited()
            theirs = _together(lambda at: _ring(at, meeting.place), 3)
        assert (len(of_lines), len(_limited())) == (2, 2 + 6)
        assert not {user.fileno() for user in users} & set(_limited())
        for each in [*ours, *theirs]:
            (each.close if isinstance(each, Connection) else each.break_off)()
        for user in users:
            user.close()


def _ring(at, place):
    ring = ElasticGroup("a secret", at, 3)
    ring.connect(place, 60)
    return ring


def _together(make, size):
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(make, range(size)))


def _limited():
    """Return the descriptors of connections that end when their host is silent."""
    found = []
    for file in silence._open_files().values():
        with socket.socket(fileno=os.dup(file)) as connection:
            if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000:
                found.append(file)
    return found
