"""Steps from the collectives of scripts without DDP."""

import numpy as np
import pytest

from paceline.ddp_recording.collectives import steps_of
from paceline.probe.collective_log import rows_of

STEPS, PER_STEP = 12, 3


def began(late_s=(0.0, 0.02), clocks_s=(0.0, 0.0), work_s=0.05):
    """Return the collectives of ranks: three a step, before the first of which each rank works."""
    now_s, rows = 0.0, [[] for _ in late_s]
    for step in range(STEPS):
        for each in range(PER_STEP):
            arrivals_s = [now_s + (work_s + late if each == 0 else 0.0001) for late in late_s]
            for rank, arrival_s in enumerate(arrivals_s):
                sequence = step * PER_STEP + each + 1
                rows[rank].append((step, 0, sequence, round((100 + arrival_s + clocks_s[rank]) * 1e9)))
            now_s = max(arrivals_s)
    return [np.array(each, dtype=float).T for each in rows]


@pytest.mark.parametrize("clocks_s", [(0.0, 0.0), (0.0, 0.5)])
def test_a_rank_waits_until_the_last_one_begins(clocks_s):
    fast, slow = steps_of(began(clocks_s=clocks_s), hosts=["a", "b"])
    assert fast["step"].tolist() == list(range(STEPS))
    assert fast["sync_ns"][1:] == pytest.approx(np.full(STEPS - 1, 0.02), abs=1e-4)
    assert slow["sync_ns"][1:] == pytest.approx(np.zeros(STEPS - 1), abs=1e-4)
    assert slow["data_ns"][1:] == pytest.approx(np.full(STEPS - 1, 0.0702), abs=1e-4)


def test_collectives_that_not_all_ranks_have_are_left_out():
    ranks = began()
    ranks[1] = ranks[1][:, : -PER_STEP * 2]
    fast, _ = steps_of(ranks, hosts=["a", "a"])
    assert len(fast["step"]) == STEPS - 2


def test_no_common_collectives_are_no_steps():
    first, second = began()
    second[2] += 1000
    assert [len(rank["step"]) for rank in steps_of([first, second], hosts=["a", "a"])] == [0, 0]


def entry(group, sequence, created_ns, is_p2p=False):
    facts = {
        "process_group": [group, "default_pg" if group == "2" else "x"],
        "collective_seq_id": sequence,
        "time_created_ns": created_ns,
    }
    return {**facts, "is_p2p": is_p2p}


def test_only_collectives_of_all_ranks_are_read_from_the_flight_recorder():
    dump = {
        "pg_config": {"0": {"ranks": "[0, 1, 2]"}, "1": {"ranks": "[0, 1]"}},
        "entries": [entry("0", 1, 5), entry("1", 1, 6), entry("0", 2, 15), entry("0", 0, 16, True), entry("2", 3, 25)],
    }
    assert list(rows_of(dump, 3, ends_ns=[10, 20])) == [(0, 0, 1, 5), (1, 0, 2, 15), (2, 2, 3, 25)]
