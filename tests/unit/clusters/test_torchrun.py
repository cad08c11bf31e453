"""What torchrun's variables and the arguments of `pl.Torchrun` may be, and what is said of those that may not."""

import json
import re

import pytest

import paceline as pl
from paceline.cli.saved_options import SavedOptions
from paceline.clusters.parser import parse_cluster
from paceline.protocols.protocol import as_plan
from paceline.recording.schema import SCHEMA

NO_HOSTS = ["tcp://x", "", "10.0.0.1:0", "10.0.0.1:65536", "[::1]:29511", "a b", "10.0.0.1\n"]

BAD = [
    ({"RANK": None}, r"RANK is not set, although WORLD_SIZE, MASTER_ADDR, MASTER_PORT are set: .* paceline run"),
    ({"MASTER_ADDR": None, "MASTER_PORT": ""}, r"MASTER_ADDR, MASTER_PORT are not set, although"),
    ({"RANK": "4"}, r"RANK='4', expected a whole number >= 0 and <= 3: .* to join a run, set .* RANK of a process"),
    ({"WORLD_SIZE": "0"}, r"WORLD_SIZE='0', expected a whole number >= 1"),
    ({"MASTER_PORT": "http"}, r"MASTER_PORT='http', expected a whole number >= 1 and <= 65535"),
    ({"PACELINE_TOKEN": " "}, r"PACELINE_TOKEN begins or ends with white space, .*=\$\(paceline token\)"),
    ({"PACELINE_TOKEN": "a\n"}, r"PACELINE_TOKEN begins or ends with white space"),
    ({"PACELINE_TOKEN": "\udcff" * 40}, r"PACELINE_TOKEN is not UTF-8 text: .*=\$\(paceline token\)"),
    (
        {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"},
        r"the ranks are on several hosts, which cannot reach 127.0.0.1: .* pl.Torchrun\(.*\); make a token on one host",
    ),
    (
        {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "PACELINE_TOKEN": "secret"},
        r"which cannot reach 127.0.0.1: give the address .* pl.Torchrun\(address='10.0.0.1'\)$",
    ),
    ({"LOCAL_WORLD_SIZE": None, "MASTER_ADDR": "10.0.0.1"}, r"the ranks are on several hosts"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_missing_or_invalid_variables_are_refused(started, changes, message):
    started(**changes)
    with pytest.raises(pl.UsageError, match=message):
        pl.Torchrun()


WRONG = [
    ({"address": "10.0.0.1"}, r"is reachable from other machines: make a token on one host, export PACELINE_TOKEN=\$"),
    ({"address": "0.0.0.0"}, r"address='0.0.0.0' is reachable from other machines"),
    *[({"address": each}, f"address={re.escape(repr(each))}: expected a host, or") for each in NO_HOSTS],
    ({"threads": 0}, r"threads=0 is not a whole number in \[1, inf\)"),
    ({"start_timeout_s": 0}, r"start_timeout_s=0 is not a number in \(0, inf\)"),
    ({"worker_at_server": 1}, r"worker_at_server=1, expected true or false"),
    ({"device": "gpu"}, r"device='gpu' is not known"),
    ({"min_workers": 0}, r"min_workers=0 is not a whole number in \[1, inf\)"),
    ({"standby": 2}, r"standby=2 is not a whole number in \[0, 1\]"),
    ({"max_workers": 2.5}, r"max_workers=2.5, expected"),
    ({"faults": [pl.Fault(worker=4, draw=1)]}, r"the cluster has workers 0 to 3"),
    ({"workers": "host"}, r"workers='host', expected process or node"),
    ({"workers": "node", "faults": [pl.Fault(worker=1, draw=1)]}, r"the cluster has workers 0 to 0"),
    ({"heartbeat_timeout_s": 0.5}, r"heartbeat_timeout_s=0.5 is not a number in \[1, 86400\]"),
    ({"heartbeat_timeout_s": 1e12}, r"heartbeat_timeout_s=1000000000000.0 is not a number in \[1, 86400\]"),
    (dict.fromkeys(("tls_cert", "tls_key", "tls_ca"), "a\x00b"), r"tls_cert='a\\x00b' cannot be read .*null byte"),
    ({"encrypt": "no"}, r"encrypt='no', expected true or false"),
    ({"tls_cert": 3}, r"tls_cert=3, expected"),
    ({"shards": 0}, r"shards=0 is not a whole number in \[1, inf\)"),
    ({"shards": 2.0}, r"shards=2.0, expected a whole number"),
    ({"shards": 5}, r"shards=5, but the job has 4 processes, each of which can host one server: give at most 4"),
    ({"shards": 2, "debug": True}, r"shards=2 with debug=True, which supports one server: omit shards"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_invalid_arguments_are_refused(started, arguments, message):
    started()
    with pytest.raises(pl.UsageError, match=message):
        pl.Torchrun(**arguments)


ONE_HOST = [
    {"TORCHELASTIC_RUN_ID": None},
    {"LOCAL_WORLD_SIZE": None, "TORCHELASTIC_RUN_ID": None},
    {"MASTER_ADDR": "localhost", "LOCAL_WORLD_SIZE": "2"},
    {"MASTER_ADDR": "this-host"},
]


@pytest.mark.parametrize("changes", ONE_HOST)
def test_ranks_on_one_host_need_no_token(started, changes):
    started(**changes)
    assert (pl.Torchrun().ranks.token, pl.Torchrun(address="localhost:4711").port) == ("", 4711)


def test_the_token_and_the_run_id_are_those_of_the_environment(started):
    started(PACELINE_TOKEN="a secret", TORCHELASTIC_RUN_ID="7")
    assert (pl.Torchrun().ranks.token, pl.Torchrun().ranks.run_id) == ("a secret", "7")
    started(TORCHELASTIC_RUN_ID=None)
    assert (pl.Torchrun().ranks.token, pl.Torchrun().ranks.run_id) == ("", "")


def test_certificates_serve_instead_of_a_token(started, tls):
    started(MASTER_ADDR="10.0.0.1", LOCAL_WORLD_SIZE="2")
    assert pl.Torchrun(address="10.0.0.1", **tls).tls_key == tls["tls_key"]
    with pytest.raises(pl.UsageError, match=r"pl.Torchrun\(address='10.0.0.1'\)$"):
        pl.Torchrun(**tls)


UNFIT = [
    ("bsp", {"faults": [pl.Fault(worker=3, draw=1)]}, r"the cluster has workers 0 to 2"),
    ("bsp", {"slowness": pl.Cluster(4)}, r"slowness has 4 workers, these ranks 3: give it 3"),
    ("bsp", {"min_workers": 4}, r"min_workers=4, but the run has 3 workers: give at most 3"),
    ("all_reduce", {"standby": 1}, r"standby=1, but all_reduce has no server; omit standby"),
    ("bsp", {"standby_address": "h:1"}, r"standby_address='h:1' without a standby: give standby=1 too"),
    ("bsp", {"standby_sync": True}, r"standby_sync=True without a standby: give standby=1 too"),
    ("bsp", {"standby": 1, "shards": 2}, r"standby=1, but the servers of shards=2 would need one each; omit standby"),
    ("dc_s3gd", {"slowness": pl.Cluster(3)}, r"slowness has 3 workers, these ranks 4: give it 4"),
    (
        "dc_s3gd",
        {"worker_at_server": False},
        r"worker_at_server=False: .* has no server, so every rank is a worker; omit worker_at_server",
    ),
    ("dc_s3gd", {"shards": 2}, r"shards=2: .* has no server whose parameters could be sharded; omit shards"),
    ("dc_s3gd", {"wire": "bf16"}, r"wire='bf16': .* omit wire, or give wire=int8, int4 or top_k\(share=0.01\)"),
]


@pytest.mark.parametrize(("protocol", "arguments", "message"), UNFIT)
def test_arguments_incompatible_with_the_protocol_are_refused(started, protocol, arguments, message):
    started()
    with pytest.raises(pl.UsageError, match=message):
        pl.train(pl.jobs.digits(), protocol=protocol, cluster=pl.Torchrun(**arguments), stop="updates=3")


@pytest.mark.parametrize(
    ("rank", "arguments", "n", "worker"),
    [("1", {}, 3, 0), ("3", {}, 3, 2), ("3", {"worker_at_server": True}, 4, 3)],
)
def test_workers_are_the_ranks_beside_the_server(started, rank, arguments, n, worker):
    started(RANK=rank)
    cluster = pl.Torchrun(**arguments)
    assert (cluster.n, cluster.worker, cluster.is_server) == (n, worker, False)


def test_a_single_rank_is_server_and_has_a_worker(started):
    started(RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    assert (pl.Torchrun().n, pl.Torchrun().is_server) == (1, True)
    started(RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", PACELINE_SIDECAR="0")
    assert (pl.Torchrun().worker, pl.Torchrun().is_server) == (0, False)


WANTED = {"job": "digits", "protocol": "all_reduce", "stop": "updates=3"}


def test_a_command_started_by_torchrun_uses_its_ranks_by_default(started):
    started()
    assert SavedOptions(**WANTED, cluster=None).completed(None)["cluster"] == "torchrun"
    assert SavedOptions(**WANTED, cluster="local:4").completed(None)["cluster"] == "local:4"
    started(MASTER_PORT=None)
    with pytest.raises(pl.UsageError, match="--cluster missing"):
        SavedOptions(**WANTED, cluster=None).completed(None)


@pytest.mark.parametrize(
    ("rank", "world_size", "worker_at_server", "started_workers", "worker"),
    [
        ("1", "4", False, 3, 0),
        ("6", "4", False, 3, 5),
        ("6", "8", False, 7, 5),
        ("1", "1", False, 0, 0),
        ("6", "4", True, 4, 6),
    ],
)
def test_an_elastic_run_has_the_same_number_of_workers_for_every_process(
    started, rank, world_size, worker_at_server, started_workers, worker
):
    started(RANK=rank, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=None, TORCHELASTIC_RUN_ID=None)
    cluster = pl.Torchrun(max_workers=8, worker_at_server=worker_at_server)
    assert (cluster.n, cluster.started, cluster.worker) == (8, started_workers, worker)


def test_a_rank_beyond_those_that_were_started_needs_max_workers(started):
    started(RANK="6")
    with pytest.raises(pl.UsageError, match=r"RANK='6', expected a whole number >= 0 and <= 3: .*max_workers=N"):
        pl.Torchrun(min_workers=1)
    arguments = {"protocol": "bsp", "stop": "updates=3"}
    with pytest.raises(pl.UsageError, match=r"RANK=6 is worker 5, but max_workers=5 admits 0 to 4: give every process"):
        pl.train(pl.jobs.digits(), cluster=pl.Torchrun(max_workers=5), **arguments)


@pytest.mark.parametrize(("protocol", "workers"), [("bsp", 3), ("all_reduce", 4)])
def test_rank_0_checks_that_all_workers_that_were_started_are_admitted(started, protocol, workers):
    plan, most = as_plan(getattr(pl, protocol)()), workers - 1
    message = rf"max_workers={most}, but {workers} workers were started: give at least {workers}"
    started(RANK="0")
    with pytest.raises(pl.UsageError, match=message):
        pl.Torchrun(max_workers=most).fitted_to(plan)


def test_a_rank_that_joins_may_have_any_world_size(started):
    started(RANK="3", WORLD_SIZE="9", LOCAL_WORLD_SIZE=None, TORCHELASTIC_RUN_ID=None)
    assert pl.Torchrun(max_workers=3).fitted_to(as_plan(pl.bsp())).worker == 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "Torchrun() with 3 workers"),
        ({"min_workers": 2}, "Torchrun()"),
        ({"min_workers": 2, "max_workers": 8}, "Torchrun(max_workers=8)"),
    ],
)
def test_the_text_of_an_elastic_cluster_names_no_number_that_may_change(started, options, text):
    started()
    assert str(pl.Torchrun(**options)) == text


NO_NODES = [
    (
        {"LOCAL_WORLD_SIZE": "2"},
        r"workers='node', but GROUP_RANK or GROUP_WORLD_SIZE is not set: .* without torchrun, set",
    ),
    ({"GROUP_RANK": "0"}, r"workers='node', but GROUP_RANK or GROUP_WORLD_SIZE is not set"),
    ({"GROUP_WORLD_SIZE": "2"}, r"workers='node', but GROUP_RANK or GROUP_WORLD_SIZE is not set"),
    (
        {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2"},
        r"4 processes on this host and 4 on 2 hosts: start the same number on every",
    ),
    (
        {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
        r"RANK=1 is not GROUP_RANK=1 \* LOCAL_WORLD_SIZE=2 \+ LOCAL_RANK=1: number the processes host by host",
    ),
    (
        {"GROUP_RANK": "4", "GROUP_WORLD_SIZE": "1"},
        r"RANK=1 is not GROUP_RANK=4 \* LOCAL_WORLD_SIZE=4 \+ LOCAL_RANK=1: number the processes host by host",
    ),
]


@pytest.mark.parametrize(("changes", "message"), NO_NODES)
def test_unknown_or_unequal_hosts_are_refused(started, changes, message):
    started(**changes)
    with pytest.raises(pl.UsageError, match=message):
        pl.Torchrun(workers="node")


@pytest.mark.parametrize("at_server", [False, True])
@pytest.mark.parametrize(("nodes", "local"), [(1, 1), (1, 2), (1, 4), (2, 1), (3, 1), (2, 2), (3, 4)])
def test_every_process_has_a_local_rank_in_a_worker(started, nodes, local, at_server):
    places = []

    def place(rank, **changes):
        node, local_rank = divmod(rank, local)
        more = {"GROUP_RANK": node, "GROUP_WORLD_SIZE": nodes, "WORLD_SIZE": nodes * local, **changes}
        told = {"RANK": rank, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local, **more}
        started(**{name: str(value) for name, value in told.items()})
        return pl.Torchrun(workers="node", worker_at_server=at_server)

    server = place(0)
    ranks = [place(rank) for rank in range(1, nodes * local)]
    if server.has_worker_at_server:
        ranks.append(place(0, PACELINE_SIDECAR=0))
    evaluator = place(0, PACELINE_SIDECAR=server.n)
    assert (evaluator.worker, evaluator.rank_in_node, evaluator.node_size) == (server.n, 0, 1)
    assert evaluator.worker_name == "the evaluator"
    assert {cluster.worker_name for cluster in ranks} == {f"worker {number}" for number in range(server.n)}
    assert {cluster.n for cluster in ranks} == {server.n}
    places = sorted((cluster.worker, cluster.rank_in_node) for cluster in ranks)
    assert places == [(w, place) for w in range(server.n) for place in range(sum(each == w for each, _ in places))]
    for cluster in ranks:
        assert cluster.node_size == sum(worker == cluster.worker for worker, _ in places)
    by_host = {cluster.worker: cluster.ranks.node for cluster in ranks}
    assert len(set(by_host.values())) == server.n


LATE_HOST = {
    "RANK": "9",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "4",
    "GROUP_WORLD_SIZE": "2",
}


def test_a_host_beyond_those_that_were_started_needs_max_workers(started):
    started(**LATE_HOST)
    cluster = pl.Torchrun(workers="node", max_workers=5)
    assert (cluster.n, cluster.started, cluster.worker, cluster.rank_in_node, cluster.node_size) == (5, 2, 4, 1, 2)
    with pytest.raises(pl.UsageError, match=r"RANK='9', expected a whole number >= 0 and <= 3: .*max_workers=N"):
        pl.Torchrun(workers="node")
    arguments = {"protocol": "bsp", "stop": "updates=3"}
    with pytest.raises(pl.UsageError, match=r"RANK=9 is worker 4, but max_workers=4 admits 0 to 3: give every process"):
        pl.train(pl.jobs.digits(), cluster=pl.Torchrun(workers="node", max_workers=4), **arguments)


def test_it_can_be_given_as_text(started):
    started(PACELINE_TOKEN="secret")
    cluster = parse_cluster("torchrun(address=10.0.0.1:29511, worker_at_server=true)")
    assert (cluster.host, cluster.port, cluster.n) == ("10.0.0.1", 29511, 4)
    assert str(parse_cluster("torchrun")) == "Torchrun() with 3 workers"
    assert str(parse_cluster("torchrun(workers=node)")) == "Torchrun(workers='node') with 1 worker"
    with pytest.raises(pl.UsageError, match="torchrun has no knob 'worker'; did you mean 'workers'"):
        parse_cluster("torchrun(worker=3)")
    with pytest.raises(pl.UsageError, match="torchrun has no knob 'elastic'; did you mean 'min_workers'"):
        parse_cluster("torchrun(elastic=true)")


@pytest.mark.parametrize("make", [pl.compare, pl.lr_range_test])
def test_several_runs_are_refused(started, make):
    started()
    more = {"protocols": "bsp, asp", "stop": "updates=3"} if make is pl.compare else {"protocol": "k_sync", "k": 1}
    with pytest.raises(pl.UsageError, match=r"(compare|lr_range_test) makes several runs, .*; give local:4 or"):
        make(pl.jobs.digits(), cluster="torchrun", **more)


@pytest.mark.parametrize(("shards", "hosts"), [(1, []), (2, [2]), (3, [1, 2]), (4, [1, 2, 3])])
def test_shard_servers_are_distributed_over_the_ranks(started, shards, hosts):
    by_rank = {}
    for rank in range(4):
        started(RANK=str(rank))
        by_rank[rank] = pl.Torchrun(shards=shards).sidecars_here
    assert [rank for rank, here in by_rank.items() for _ in here] == hosts
    # 3 workers, one that evaluates, and then the shards
    assert sorted(number for here in by_rank.values() for number in here) == list(range(4, 3 + shards))
    started(RANK="2", PACELINE_SIDECAR="5")
    cluster = pl.Torchrun(shards=shards)
    assert (cluster.shard, cluster.sidecars_here) == (2 if shards > 2 else None, [])


def test_the_standby_is_beside_the_last_rank(started):
    for rank, here in (("2", []), ("3", [4])):
        started(RANK=rank, TORCHELASTIC_RUN_ID=None)
        assert pl.Torchrun(standby=1).sidecars_here == here
    started(RANK="3", PACELINE_SIDECAR="4")
    assert (pl.Torchrun(standby=1).is_standby, pl.Torchrun(standby=1).sidecars_here) == (True, [])


def test_shards_can_be_given_as_text_and_do_not_change_the_run(started):
    started()
    cluster = parse_cluster("torchrun(shards=2)")
    assert cluster.shards == 2
    assert str(cluster) == str(pl.Torchrun())


def test_options_that_differ_between_hosts_or_change_no_result_are_not_part_of_the_run(started, tls):
    started(PACELINE_TOKEN="secret")
    files = ", ".join(f"{name}={path}" for name, path in tls.items())
    cluster = parse_cluster(f"torchrun(address=10.0.0.1, heartbeat_timeout=5, start_timeout=9, {files})")
    assert (cluster.heartbeat_timeout_s, cluster.tls_cert) == (5, tls["tls_cert"])
    assert str(cluster) == str(parse_cluster("torchrun(encrypt=false)")) == str(pl.Torchrun())


@pytest.mark.parametrize(
    ("old", "new"), [("slices", "shards"), ("silence_s", "heartbeat_timeout_s"), ("silence", "heartbeat_timeout_s")]
)
def test_an_old_name_of_an_option_is_refused_with_the_new_one(started, old, new):
    started()
    with pytest.raises(pl.UsageError, match=f"torchrun has no knob '{old}'; did you mean '{new}'"):
        parse_cluster(f"torchrun({old}=2)")
    with pytest.raises(TypeError, match=f"Torchrun has no argument '{old}'; did you mean '{new}'"):
        pl.Torchrun(**{old: 2})


def test_protocols_without_a_server_refuse_shards(started):
    started()
    with pytest.raises(pl.UsageError, match=r"shards=2: all_reduce has no server whose parameters could be sharded"):
        pl.Torchrun(shards=2).check_plan(as_plan(pl.all_reduce()))


OPTIONS = {"job": "digits", "protocol": "bsp", "cluster": "torchrun", "stop": "updates=3", "seed": None}


def test_other_ranks_resume_without_the_folder(started, tmp_path):
    started(RANK="1")
    assert SavedOptions(OPTIONS).completed(tmp_path / "nowhere")["seed"] == 0
    said = r"there is no run in .*nowhere here, on rank 1; share that folder, or give --protocol, --stop as on rank 0"
    with pytest.raises(pl.UsageError, match=said):
        SavedOptions({**OPTIONS, "protocol": None, "stop": None}).completed(tmp_path / "nowhere")
    started(RANK="0")
    with pytest.raises(pl.UsageError, match="there is no folder"):
        SavedOptions(OPTIONS).completed(tmp_path / "nowhere")


def test_other_ranks_read_the_folder_if_it_exists(started, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"schema": SCHEMA}))
    (tmp_path / "command.json").write_text('{"seed": 7}')
    started(RANK="1")
    assert SavedOptions(OPTIONS).completed(tmp_path)["seed"] == 7
