"""Two hundred faults in one run over four hosts, and still every sample is applied exactly once an epoch."""

import threading
from collections import Counter
from random import Random

import pytest

import paceline as pl
from benchmarks.namespaces import hosts
from hosts import need_hosts, ranks_on_hosts
from machine_speed import scaled
from paceline.core.records import WorkUnfinished
from tiny_counting import BATCH, counting_job, times_applied

PLACES = [0, 1, 1, 2, 2, 3, 3]  # rank 0 has a host of its own
N = len(PLACES) - 1
EPOCHS = 3
SAMPLES = 300 * BATCH
DRAWS = 1000  # more than any worker gets to


def script(random):
    """Return what befalls each worker at which draws, one in three to six of them."""
    told = {}
    for worker in range(N):
        draw = 0
        while (draw := draw + random.randint(3, 6)) < DRAWS:
            told[worker, draw] = random.choices(["die", "hang", "cut"], [5, 2, 3])[0]
    return told


class Script(pl.callbacks.Callback):
    """Cuts links by script, for the scripted times, and reports which workers hang."""

    def __init__(self, made, befalls, said):
        self._hosts = made
        self._befalls = befalls
        self._random = Random(9)
        self._said = said

    def on_record(self, record):
        if isinstance(record, WorkUnfinished) and self._befalls.get((record.worker, record.draw)) == "hang":
            self._say(f"hang {record.worker}")
        super().on_record(record)

    def on_arrival(self, arrival):
        place = PLACES[arrival.worker + 1]
        if self._befalls.get((arrival.worker, arrival.draw)) == "cut" and not self._hosts.is_cut(place):
            self._hosts.cut(place)
            mending = threading.Timer(self._random.uniform(0.2, 2.0), self._hosts.mend, [place])
            mending.daemon = True
            mending.start()
            self._say(f"cut {place}")

    def _say(self, what):
        with self._said.open("a") as file:
            file.write(f"{what}\n")


def supervise(job, said):
    """Restart processes that have ended, and end those that hang, until rank 0 is done; return the observations."""
    seen, read = Counter(), 0
    while not job.has_ended(0, within_s=0.05):
        lines = said.read_text().splitlines() if said.exists() else []
        for what, number in (line.split() for line in lines[read:]):
            seen[what] += 1
            if what == "hang":
                job.processes[int(number) + 1].kill()
        read = len(lines)
        for rank in range(1, N + 1):
            if not job.processes[rank].is_alive():
                seen[f"ended {job.processes[rank].exitcode}"] += 1
                job.start(rank)
    return seen


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_two_hundred_faults_in_one_run(tmp_path):
    need_hosts()
    befalls = script(Random(4))
    faults = [
        pl.Fault(worker=worker, draw=draw, kind=kind) for (worker, draw), kind in befalls.items() if kind != "cut"
    ]
    torchrun = {"slowness": pl.Cluster(N, timing=pl.timing.Exponential(0.02)), "faults": faults}
    settings = {"protocol": "k_async(k=2)", "stop": f"epochs={EPOCHS}", "worker_timeout_s": scaled(1.0)}
    said = tmp_path / "said"
    with hosts(4) as made:
        watching = [Script(made, befalls, said)]
        with ranks_on_hosts(made, PLACES, counting_job(SAMPLES), torchrun, watching, **settings) as job:
            job.start_all()
            seen = supervise(job, said)
            end = job.end(0)
    killed = seen["ended -9"] - seen["hang"]
    assert min(killed, seen["hang"], seen["cut"]) >= 20, (end.reason, seen)
    assert killed + seen["hang"] + seen["cut"] >= 200
    model = counting_job(SAMPLES).model()
    model.load_state_dict(end.parameters)
    assert times_applied(model) == [EPOCHS] * SAMPLES, end.reason
