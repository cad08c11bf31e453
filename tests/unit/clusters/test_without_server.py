"""What ranks without a server cannot run, and what to type instead."""

import pytest

import paceline as pl
from paceline.catalogue.parser import parse_plan

PLANS = [
    (
        "asp",
        r"asp with server=False: .* stale gradient would cost a sum of all ranks; type balanced\(m=8\), or omit server",
    ),
    ("bsp@updates=2 >> ssp(lead=2)", r"type balanced\(m=8\), or omit server"),
    ("auto", r"type auto\(fresh=true\), or omit server"),
    ("auto(candidates=['bsp', 'asp'])", r"type auto\(fresh=true\), or omit server"),
    ("bsp + greedy", r"type balanced\(m=8\), or omit server"),
    ("bsp + local_steps(H=4)", r"local steps are handed in at a server; omit server, or type local_sgd\(H=4\)"),
    ("asp + staleness_weight", r"a gradient is compensated at a server; omit server"),
]
CLUSTERS = [
    ({"wire": "int8"}, r"wire='int8' with server=False, which does not support it: omit one of them"),
    ({"shards": 2}, r"shards=2 with server=False"),
    ({"standby": 1, "standby_sync": True}, r"standby_sync=True with server=False"),
    (
        {"worker_at_server": False},
        r"worker_at_server=False: server=False, so every rank is a worker; omit worker_at_server",
    ),
    ({"workers": "node"}, r"workers='node': server=False, so every process is a worker"),
]


@pytest.fixture
def started(monkeypatch):
    variables = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
    more = {"GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "PACELINE_TOKEN": "a token"}
    for name, value in {**variables, **more}.items():
        monkeypatch.setenv(name, value)


def refused(protocol, message, **arguments):
    with pytest.raises(pl.UsageError, match=message):
        pl.train(pl.jobs.digits(), protocol=protocol, cluster=pl.Torchrun(server=False, **arguments), stop="updates=3")


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize(("protocol", "message"), PLANS)
def test_a_plan_that_needs_a_server_is_refused_with_the_nearest_one(protocol, message):
    refused(protocol, message)


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize(("arguments", "message"), CLUSTERS)
def test_arguments_of_a_server_are_refused(arguments, message):
    refused("bsp", message, **arguments)


@pytest.mark.usefixtures("started")
def test_every_rank_is_a_worker():
    cluster = pl.Torchrun(server=False).fitted_to(parse_plan("bsp"))
    assert (cluster.n, cluster.worker, cluster.has_worker_at_server) == (4, 0, True)
