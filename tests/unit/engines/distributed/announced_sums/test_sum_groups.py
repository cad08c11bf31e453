"""Groups for sums at the coordinator, with ranks that only record what they are sent."""

from types import SimpleNamespace

import pytest

from group_members import Wire, peer, transport
from paceline.engines.distributed.allreduce.elastic_group import ElasticGroup
from paceline.engines.distributed.announced_sums.early_rounds import EarlyRounds
from paceline.engines.distributed.announced_sums.sum_groups import SumGroups
from paceline.engines.distributed.transport.sum_messages import FormGroup, StoreKey


@pytest.fixture
def groups(monkeypatch):
    monkeypatch.setattr(ElasticGroup, "connect", lambda *args: None)
    monkeypatch.setattr(ElasticGroup, "broadcast_state", lambda *args: {})
    return SumGroups(SimpleNamespace(), transport(5.0), EarlyRounds(is_certain=False))


def added(groups, number):
    connection = Wire()
    member = peer(number, connection)
    groups.add(SimpleNamespace(worker=number, peer_id=member.peer_id, connection=connection, gpu=""), {})
    return member


def test_keys_of_a_group_reach_its_members_though_a_rank_joins_while_it_forms(groups):
    first, second = added(groups, 0), added(groups, 1)
    groups.form()
    number = groups.generation
    added(groups, 2)
    groups.form()
    key = StoreKey(number, "rank", b"address")
    groups.on_message(first, key, 0.0, 0.0)
    assert second.connection.sent[-1] == key
    assert first.connection.sent[-1] != key
    assert isinstance(second.connection.sent[-2], FormGroup)
    groups.on_message(first, StoreKey(groups.generation + 1, "rank", b"address"), 0.0, 0.0)
    assert second.connection.sent[-1] == key
