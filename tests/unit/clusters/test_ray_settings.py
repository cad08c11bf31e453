"""What the arguments of `pl.Ray` may be, and what its actors get, without Ray itself."""

from importlib.util import find_spec

import pytest

import paceline as pl
from paceline.clusters.launch_env import LaunchEnv
from paceline.clusters.parser import parse_cluster
from paceline.clusters.placement import Placement
from paceline.protocols.protocol import as_plan
from paceline.run.config import RunConfig
from tiny_jobs import tiny_job

BSP, ALL_REDUCE = as_plan(pl.bsp()), as_plan(pl.all_reduce())

WRONG = [
    ({"workers": 0}, r"workers=0 is not a whole number in \[1, inf\)"),
    ({"max_restarts": -2}, r"max_restarts=-2 is not a whole number in \[-1, inf\)"),
    ({"resources_per_worker": {"GPU": -1}}, r"resources_per_worker\['GPU'\]=-1 is not a number in \[0, inf\)"),
    ({"resources_per_worker": {"gpu": 1}}, r"resources_per_worker has 'gpu', expected 'GPU', the name of the resource"),
    ({"resources_per_worker": {"num_cpus": 1}}, r"resources_per_worker has 'num_cpus', expected 'CPU'"),
    ({"resources_per_worker": {"num_gpus": 1}}, r"resources_per_worker has 'num_gpus', expected 'GPU'"),
    ({"server_resources": {"Memory": 1e9}}, r"server_resources has 'Memory', expected 'memory'"),
    ({"resources_per_worker": {"GPU": 1.5}}, r"resources_per_worker\['GPU'\]=1.5, expected a whole number, .*: give 2"),
    ({"server_resources": {"GPU": 2.25}}, r"server_resources\['GPU'\]=2.25, expected a whole number, .*: give 3"),
    ({"server_resources": {"Cpu": 1}}, r"server_resources has 'Cpu', expected 'CPU'"),
    ({"resources_per_worker": {"GPU": "one"}}, r"resources_per_worker\['GPU'\]='one', expected a number"),
    ({"torchrun": {"address": "10.0.0.1"}}, r"torchrun has 'address', which pl.Ray does not take: the actors exchange"),
    ({"torchrun": {"device": "cuda"}}, r"torchrun has 'device', .* give resources_per_worker=\{'GPU': 1\}"),
    ({"torchrun": {"max_workers": 1}}, r"torchrun has max_workers=1, expected a whole number >= workers=2: give max_"),
    ({"torchrun": {"max_workers": 0}}, r"torchrun has max_workers=0, .*: give max_workers=2 or more, or fewer workers"),
    ({"torchrun": {"max_workers": 2.5}}, r"torchrun has max_workers=2.5, expected a whole number >= workers=2"),
    ({"torchrun": {"max_workers": "all"}}, r"torchrun has max_workers='all', expected a whole number >= workers=2"),
    ({"workers": 1, "torchrun": {"max_workers": True}}, r"max_workers=True, expected a whole number"),
    ({"torchrun": {"worker_at_server": True}}, r"torchrun has 'worker_at_server', .* give one more in workers"),
    ({"torchrun": {"workers": "node"}}, r"torchrun has 'workers', .* omit it"),
    ({"torchrun": {"standby": 1}}, r"torchrun has 'standby', which pl.Ray does not take: it makes the actor of rank 0"),
    ({"torchrun": {"standby_sync": True}}, r"torchrun has 'standby_sync', .* the run resumes .*; omit it"),
    ({"torchrun": {"wier": "bf16"}}, r"torchrun has no knob 'wier'; did you mean 'wire'\?"),
    ({"torchrun": {"threads": 0}}, r"threads=0 is not a whole number in \[1, inf\)"),
    ({"torchrun": {"shards": 4}}, r"shards=4, but the job has 3 processes"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_arguments_that_cannot_work_are_refused_before_an_actor_is_made(changes, message):
    with pytest.raises(pl.UsageError, match=message):
        pl.Ray(**{"workers": 2, **changes})


def test_a_text_has_the_same_arguments():
    text = "ray(workers=8, resources_per_worker={CPU=2, GPU=0.5}, max_restarts=3, torchrun={wire=bf16, threads=4})"
    resources, torchrun = {"CPU": 2, "GPU": 0.5}, {"wire": "bf16", "threads": 4}
    assert parse_cluster(text) == pl.Ray(8, resources_per_worker=resources, max_restarts=3, torchrun=torchrun)
    assert parse_cluster("ray(workers=2)").n == 2
    assert parse_cluster("ray(workers=4, torchrun={max_workers=8})") == pl.Ray(4, torchrun={"max_workers": 8})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ray", r"ray needs workers: type ray\(workers=\.\.\.\)"),
        ("ray(worker=2)", r"ray has no knob 'worker'; did you mean 'workers'"),
        ("ray(workers=2, torchrun={bf16})", r"'bf16' has no name in \{...\}: type it as knob=value, as in \{GPU=1\}"),
        ("ray(workers=2, torchrun=bf16)", r"ray: torchrun='bf16', expected a dict from text"),
    ],
)
def test_a_wrong_text_is_an_error_with_a_remedy(text, message):
    with pytest.raises(pl.UsageError, match=message):
        parse_cluster(text)


def test_a_plan_with_a_server_has_one_more_actor():
    cluster = pl.Ray(workers=3)
    assert (cluster.size(BSP), cluster.size(ALL_REDUCE)) == (4, 3)
    for plan in (BSP, ALL_REDUCE):
        fitted = cluster.fitted_to(plan)
        assert (fitted.n, fitted.ranks.world_size, fitted.is_server) == (3, cluster.size(plan), True)
        assert str(fitted).endswith("threads=1) with 3 workers")


def test_a_plan_has_the_largest_number_of_workers_and_begins_with_the_first_ones():
    cluster = pl.Ray(workers=4, torchrun={"max_workers": 8})
    assert (cluster.n, cluster.size(BSP), cluster.size(ALL_REDUCE)) == (8, 5, 4)
    for plan in (BSP, ALL_REDUCE):
        fitted = cluster.fitted_to(plan)
        assert (fitted.n, fitted.started, fitted.ranks.world_size) == (8, 4, cluster.size(plan))
    assert pl.Ray(4, torchrun={"max_workers": None}).n == 4


def test_the_resources_of_an_actor_are_those_of_ray():
    workers = {"CPU": 4, "GPU": 1, "memory": 1e9, "spot": 0.01}
    cluster = pl.Ray(2, resources_per_worker=workers, runtime_env={"pip": ["mine"]})
    assert cluster.actor_options(is_server=False) == {
        "num_cpus": 4,
        "num_gpus": 1,
        "memory": 1e9,
        "resources": {"spot": 0.01},
        "runtime_env": {"pip": ["mine"]},
        "max_restarts": 0,  # the driver makes actors again itself
    }
    assert pl.Ray(2).actor_options(is_server=True) == {
        "num_cpus": 1,
        "num_gpus": 0,
        "resources": {},
        "max_restarts": 0,
    }


def test_device_and_threads_of_an_actor_follow_from_its_resources():
    cluster = pl.Ray(2, resources_per_worker={"CPU": 4, "GPU": 1}, torchrun={"wire": "bf16"})
    assert cluster.arguments(is_server=False) == {"device": "cuda", "threads": 4, "wire": "bf16"}
    assert cluster.arguments(is_server=True) == {"device": "cpu", "threads": 1, "wire": "bf16"}
    half = pl.Ray(2, resources_per_worker={"CPU": 0.5, "GPU": 0.0})
    assert half.arguments(is_server=False) == {"device": "cpu", "threads": 1}


@pytest.mark.parametrize(
    ("plan", "cluster", "message"),
    [
        (BSP, pl.Ray(2, torchrun={"min_workers": 3}), "min_workers=3, but the run has 2 workers"),
        (BSP, pl.Ray(2, torchrun={"slowness": pl.Cluster(3)}), "slowness has 3 workers, these ranks 2"),
        (BSP, pl.Ray(2, torchrun={"max_workers": 4, "min_workers": 5}), "min_workers=5, but the run has 4 workers"),
        (ALL_REDUCE, pl.Ray(2, torchrun={"wire": "bf16"}), "wire='bf16': all_reduce sums in float32"),
    ],
)
def test_a_plan_that_the_actors_cannot_run_is_refused_in_the_driver(plan, cluster, message):
    with pytest.raises(pl.UsageError, match=message):
        cluster.fitted_to(plan)


def test_rank_0_of_ray_checks_the_run():
    config = RunConfig(
        job=tiny_job(), plan=as_plan(pl.k_sync(k=5)), cluster=pl.Ray(2).fitted_to(BSP), stop=pl.Stop(updates=3), seed=1
    )
    with pytest.raises(pl.UsageError, match="k=5"):
        config.check()


@pytest.mark.skipif(find_spec("ray") is not None, reason="ray is installed")
def test_without_ray_the_error_says_what_to_install():
    with pytest.raises(pl.UsageError, match=r"^ray is not installed; run: pip install 'paceline\[ray\]'$"):
        pl.train(tiny_job(), protocol="bsp", cluster="ray(workers=2)", stop="updates=3")


def test_a_comparison_is_refused():
    with pytest.raises(pl.UsageError, match=r"compare makes several runs, but actors of Ray make one; give local:4"):
        pl.compare(tiny_job(), protocols=["bsp"], cluster=pl.Ray(2), stop="updates=3")


def test_a_rank_that_has_no_host_yet_is_beside_no_other():
    ranks = LaunchEnv.from_environment(Placement(hosts=("10.0.0.1", "", "10.0.0.1"), port=4711).environment(2))
    assert (ranks.local_rank, ranks.local_world_size, ranks.master) == (1, 2, ("127.0.0.1", 4711))
