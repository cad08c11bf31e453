"""Workers that are all processes of a host, as threads of this process: what joins, what ends, what comes back."""

import pytest

import paceline as pl
from end_when import FOREVER, EndWhen
from paceline.core.records import WorkerLost
from rank_threads import ranks, run
from ranks import flat
from selections import parametrize_few
from this_process import in_thread
from tiny_jobs import largest_relative_difference, tiny_job

EXACT = 1e-12
NODE = {"workers": "node"}


@parametrize_few(("world_size", "nodes", "shards"), [(4, 2, 1), (4, 2, 3), (4, 1, 1)], keep=1)
def test_a_host_computes_the_gradient_of_one_worker(world_size, nodes, shards):
    job = tiny_job(batch_size=7)
    ends = run(world_size, job, {**NODE, "shards": shards}, nodes=nodes, protocol="bsp", stop="updates=15")
    simulated = pl.train(job, protocol="bsp", cluster=pl.Cluster(nodes), stop=pl.Stop(updates=15), seed=1)
    for end in ends:
        assert largest_relative_difference(flat(end.parameters), flat(simulated.model.state_dict())) < EXACT
        assert end.reason == "15 updates made"


@pytest.mark.slow
@pytest.mark.parametrize("killed", [2, 3], ids=["leader", "follower"])
def test_a_process_that_dies_takes_its_group_with_it_and_the_group_comes_back(killed):
    is_back = EndWhen(lambda seen: seen.joined and seen.used_since[1] > 3)
    with ranks(4, tiny_job(), NODE, nodes=2, protocol="bsp", stop=FOREVER, callbacks=[is_back]) as job:

        def kill_and_start_again():
            job.await_training()
            job.processes[killed].kill()
            with pytest.raises(pl.RunError, match=r"a process of its host is gone|first process of worker 1 is gone"):
                job.end(5 - killed)
            job.start(2)
            job.start(3)

        job.start_workers()
        acting, raised = in_thread(kill_and_start_again)
        end = job.serve()
        acting.join()
        assert raised == []
        for rank in (1, 2, 3):
            assert job.end(rank).reason == end.reason
    assert [record.worker for record in end.of(WorkerLost)] == [1]
    assert end.of(pl.callbacks.UpdateMade)[-1].k == 2  # the new group takes part


def test_a_follower_names_the_leader_that_does_not_come():
    with ranks(3, tiny_job(), {**NODE, "start_timeout_s": 0.5}, protocol="bsp", stop="updates=5") as job:
        job.start(0)
        job.started(0)
        job.start(2)
        with pytest.raises(pl.RunError, match=r"first process of worker 0 could not be reached within start_timeout"):
            job.end(2)


def test_a_follower_that_comes_first_waits_for_its_leader():
    with ranks(3, tiny_job(), NODE, protocol="bsp", stop="updates=5") as job:
        for rank in (2, 0, 1):
            job.start(rank)
            job.started(rank)
        for rank in range(3):
            assert job.end(rank).stopped_by == "updates"
