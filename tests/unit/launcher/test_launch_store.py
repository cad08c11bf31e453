"""Store in the launcher: what rank 0 tells it about the run, and an empty store for a new attempt."""

from dataclasses import replace

import pytest

import paceline as pl
from paceline.clusters.launch_env import BEGUN_BEFORE, ENDED, STANDBY
from paceline.clusters.launch_settings import LaunchSettings
from paceline.engines.distributed import is_restart, tell_launcher
from paceline.errors import UsageError
from paceline.launcher.launch_store import LaunchStore
from paceline.launcher.run_facts import RunFacts
from paceline.protocols.protocol import as_plan
from ranks import free_port

PLAN = as_plan(pl.bsp())
SETTINGS = LaunchSettings(
    nproc_per_node=2, nnodes=1, node_rank=0, master="127.0.0.1", port=0, max_restarts=-1, token="a token of two ranks"
)


@pytest.fixture
def store():
    """Return a store that serves."""
    with LaunchStore(SETTINGS) as opened:
        opened.begin()
        yield opened


@pytest.fixture
def rank_0(store, monkeypatch):
    """Return the launch settings of rank 0."""
    for name, value in SETTINGS.environment(0, store.port, restarts=0).items():
        monkeypatch.setenv(name, value)
    return pl.Torchrun()


def facts(store):
    return RunFacts(store.client(), SETTINGS.world_size)


def test_rank_0_tells_its_launcher_what_holds(store, rank_0):
    assert (rank_0.ranks.restarts, rank_0.ranks.max_restarts, rank_0.ranks.keeps_ranks) == (0, -1, True)
    assert not facts(store).holds(ENDED)
    tell_launcher(rank_0, ENDED)
    assert facts(store).holds(ENDED)
    assert not facts(store).holds(STANDBY)
    tell_launcher(rank_0, ENDED, holds=False)  # another run of the same script
    assert not facts(store).holds(ENDED)


def test_a_new_attempt_has_an_empty_store(store, rank_0):
    tell_launcher(rank_0, STANDBY)
    store.renew()
    store.begin()
    assert not facts(store).holds(STANDBY)


def test_a_new_attempt_meets_at_the_same_address():
    port = free_port()
    with LaunchStore(replace(SETTINGS, port=port)) as store:
        for _ in range(2):
            store.begin()
            store.renew()
        assert store.port == port


@pytest.mark.parametrize("mine", ["/runs/mine", "/runs/caf\udce9", "/runs/two\nlines"])
def test_a_rank_that_is_started_again_resumes_only_a_run_that_this_launcher_has_begun(mine, store, rank_0, monkeypatch):
    assert not is_restart(rank_0, mine, begins=False)
    assert not is_restart(rank_0, mine)
    store.renew()
    store.begin()
    for name, value in {**SETTINGS.environment(0, store.port, restarts=1), BEGUN_BEFORE: store.begun}.items():
        monkeypatch.setenv(name, value)
    again = pl.Torchrun()
    assert is_restart(again, mine, begins=False)
    assert not is_restart(again, "/runs/of yesterday", begins=False)


def test_torchrun_is_told_nothing(store, rank_0, monkeypatch):
    monkeypatch.delenv("PACELINE_KEEPS_RANKS")
    tell_launcher(pl.Torchrun(), ENDED)
    assert not facts(store).holds(ENDED)


def test_a_worker_is_to_come_back_under_this_launcher_and_may_have_a_standby(rank_0, monkeypatch):
    assert rank_0.leaving_status == 143
    assert pl.Torchrun(standby=1).fitted_to(PLAN).has_standby
    monkeypatch.delenv("PACELINE_KEEPS_RANKS")
    assert pl.Torchrun().leaving_status == 0
    with pytest.raises(UsageError, match="torchrun ends all ranks when one fails, which paceline run does not"):
        pl.Torchrun(standby=1).fitted_to(PLAN)
