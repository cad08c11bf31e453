"""An unchanged DDP script under `paceline run`, without and with losses of ranks: each sample is used once."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from math import inf
from random import Random

import pytest
import torch
from torch import nn

import paceline as pl
import surviving_ddp
from forked_ranks import run_on_forked_ranks
from launched_commands import await_records, kill, outputs, run_on_ranks, start_on_hosts
from machine_speed import scaled
from paceline.core.events import Outcome
from paceline.core.records import RunEnded, UpdateMade, WorkerJoined, WorkerLost
from paceline.recording.run_folder import SavedRun
from paths import environment
from surviving_ddp import BATCH, EPOCHS, SAMPLES, Numbered, flat, net, optimizer_of, schedule_of


def run(folder, ranks, *faults, hosts=1, **variables):
    """Run the script on hosts of this machine, and return what it has printed."""
    if hosts == 1:
        return run_on_ranks(ranks, surviving_ddp.__file__, folder, *faults, cwd=folder, **variables)
    script = surviving_ddp.__file__, folder, *faults
    return "".join(outputs(start_on_hosts(hosts, ranks // hosts, *script, cwd=folder, **variables)))


def notes_of(folder):
    """Return by iteration the samples of each rank that took part, and what each that has ended it says of it.

    A rank that comes back takes part after the first iteration in which its parameters have changed.
    """
    computed, ended = defaultdict(dict), defaultdict(dict)
    for file in sorted(folder.glob("*.jsonl")):
        returned_at = {0: -1}
        for note in map(json.loads, file.read_text().splitlines()):
            life, iteration = note["life"], note["iteration"]
            if "samples" not in note and note["stepped"]:
                returned_at.setdefault(life, iteration)
            if iteration > returned_at.get(life, inf) or (iteration == returned_at.get(life) and "samples" not in note):
                (computed if "samples" in note else ended)[iteration][int(file.stem)] = note
    return computed, ended


def await_iteration(file, count):
    """Wait until a rank has noted so many iterations."""
    deadline_s = time.monotonic() + scaled(60)
    while not file.exists() or len(file.read_text().splitlines()) < 2 * count:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def replayed(computed, ended, ranks, epochs):
    """Return the parameters of one process that computes the samples of each step, and check the learning rates."""
    data, model = Numbered(), net()
    optimizer = optimizer_of(model)
    schedule = schedule_of(optimizer, ranks, epochs)
    for iteration, notes in sorted(ended.items()):
        told = next(iter(notes.values()))
        if told["stepped"]:
            samples = [sample for note in computed[iteration].values() for sample in note["samples"]]
            optimizer.zero_grad()
            nn.functional.mse_loss(model(data.x[samples]), data.y[samples]).backward()
            optimizer.step()
            schedule.step()
        assert told["rate"] == schedule.get_last_lr()[0]
    return flat(model)


def check_log(folder, lost):
    """Check that the folder of the run has all updates since a rank was lost, each loss, and an end, and replays."""
    saved = SavedRun(folder / "runs" / "surviving_ddp-1")
    history = saved.history
    assert sorted(each.worker for each in history.of(WorkerLost)) == sorted(lost)
    [end] = history.of(RunEnded)
    assert end.outcome is Outcome.STOPPED
    assert pl.replay(saved.path).is_same
    return history


def check(folder, ranks, faults, hosts=1, **variables):
    """Check bits, samples and parameters after the losses, and return how many iterations were in vain."""
    printed = run(folder, ranks, *faults, hosts=hosts, **variables)
    shards = int(variables.get("SHARDS", "1"))
    first = {int(each.split(":")[0]) // shards * shards for each in faults} if "RETURNS_AT" not in variables else set()
    assert printed.count(" was killed by SIGKILL; it is started again in ") == shards * len(faults), printed
    assert "Traceback" not in printed, printed
    lost = {rank + shard for rank in first for shard in range(shards)}
    return check_notes(folder, ranks, lost, int(variables.get("EPOCHS", EPOCHS)), shards)


def check_notes(folder, ranks, lost, epochs, shards=1):
    """Check what the ranks have noted, of which some were lost and have not come back."""
    computed, ended = notes_of(folder)
    for iteration, notes in ended.items():
        assert len({(note["stepped"], note["rate"]) for note in notes.values()}) == 1, iteration
        assert len({(rank % shards, note["digest"]) for rank, note in notes.items()}) <= shards, iteration
    for epoch in range(epochs):
        used = Counter()
        for iteration, notes in ended.items():
            told = next(iter(notes.values()))
            if told["stepped"] and told["epoch"] == epoch:
                used.update(sample for note in computed[iteration].values() for sample in note["samples"])
        assert used == Counter(range(SAMPLES)), epoch
    whole = replayed(computed, ended, ranks, epochs)
    last = max(ended)
    assert set(ended[last]) >= set(range(ranks)) - lost
    for rank in ended[last]:
        found = torch.load(folder / f"{rank}.pt", weights_only=True)
        assert (found - whole).norm() <= 1e-12 * whole.norm()
    return sum(not next(iter(notes.values()))["stepped"] for notes in ended.values())


def check_changed(folder):
    """Check that the shares have changed before the first loss, if there is one."""
    computed, _ = notes_of(folder)
    assert len({tuple(len(note["samples"]) for note in computed[iteration].values()) for iteration in range(8)}) > 1


@pytest.mark.processes
def test_each_sample_is_used_once_with_shares_that_change(tmp_path):
    run_on_forked_ranks(2, surviving_ddp.__file__, tmp_path, folder=tmp_path, CHANGING="1")
    assert check_notes(tmp_path, 2, set(), EPOCHS) == 0
    check_changed(tmp_path)


@pytest.mark.slow
def test_the_others_go_on_and_each_sample_is_used_once(tmp_path):
    assert check(tmp_path, 2, ["1:8:forward"], CHANGING="1") == 1
    check_changed(tmp_path)


@pytest.mark.slow
def test_shares_change_among_the_ranks_that_are_left(tmp_path):
    check(tmp_path, 4, ["1:6:sum"], CHANGING="1", EPOCHS="6")
    computed, _ = notes_of(tmp_path)
    sizes = {tuple(len(each["samples"]) for each in notes.values()) for notes in computed.values() if 1 not in notes}
    assert {(6, 5, 5), (5, 5, 6)} <= sizes


@pytest.mark.slow
@pytest.mark.parametrize("place", ["forward", "sum", "step", "stepped", "evaluation"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_may_be_lost_at_any_place(tmp_path, place, lost):
    check(tmp_path, 3, [f"{lost}:9:{place}"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [["1:6:sum", "2:6:sum"], ["0:6:step", "3:6:forward"], ["0:6:stepped", "1:7:sum"], ["2:5:stepped", "1:12:stepped"]],
)
def test_several_ranks_may_be_lost(tmp_path, faults):
    check(tmp_path, 4, faults)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["sum", "stepped"])
def test_batches_that_processes_of_a_loader_hold_are_dealt_again(tmp_path, place):
    check(tmp_path, 3, [f"1:5:{place}"], LOADER_PROCESSES="2")


@pytest.mark.slow
@pytest.mark.parametrize("faults", [["1:6:forward"], ["0:6:sum"], ["0:6:stepped", "2:6:sum"]])
def test_a_rank_that_was_lost_comes_back(tmp_path, faults):
    check(tmp_path, 3, faults, RETURNS_AT="40", EPOCHS="16")
    lost = [int(each.split(":")[0]) for each in faults]
    history = check_log(tmp_path, lost)
    assert sorted(each.worker for each in history.of(WorkerJoined)) == sorted(lost)
    assert len(history.of(UpdateMade)) >= 16 * SAMPLES // BATCH // 3 - 1  # the one in which rank 0 was lost, at most


@pytest.mark.slow
@pytest.mark.parametrize("faults", [["1:30:forward"], ["0:30:sum"]])
def test_a_rank_that_was_lost_comes_back_from_the_checkpoint_of_the_script(tmp_path, faults):
    check(tmp_path, 3, faults, CHECKPOINTS="1", RETURNS_AT="60", EPOCHS="20")
    lost = int(faults[0].split(":")[0])
    notes = [json.loads(line) for line in (tmp_path / f"{lost}.jsonl").read_text().splitlines()]
    assert next(note["epoch"] for note in notes if note["life"]) >= 3  # 8 iterations an epoch


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_forty_losses(tmp_path, seed):
    draw, faults = Random(seed), []
    for begin in (6, 60):
        for rank in draw.sample(range(3), 2):
            iteration = begin + draw.randrange(8)
            places = ["forward", "sum", "step", "stepped", *(["evaluation"] if iteration % 5 == 4 else [])]
            faults.append(f"{rank}:{iteration}:{draw.choice(places)}")
    check(tmp_path, 3, faults, RETURNS_AT="30,84", EPOCHS="20")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["forward", "sum", "step", "stepped", "evaluation"])
@pytest.mark.parametrize("lost", [0, 3])
def test_a_replica_of_several_ranks_may_be_lost_at_any_place(tmp_path, place, lost):
    check(tmp_path, 4, [f"{lost}:9:{place}"], SHARDS="2")


@pytest.mark.slow
@pytest.mark.parametrize("faults", [["1:6:sum"], ["2:6:stepped"], ["3:6:forward", "0:60:step"]])
def test_a_replica_that_was_lost_comes_back_shard_by_shard(tmp_path, faults):
    check(tmp_path, 4, faults, SHARDS="2", RETURNS_AT="40,94", EPOCHS="30")


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "variables"), [(2, {}), (4, {"SHARDS": "2"})])
def test_a_rank_that_was_passed_where_it_waited_comes_back_later(tmp_path, ranks, variables):
    lost = f"{ranks - 1}:6:sum"
    check(tmp_path, ranks, [lost], RETURNS_AT="1000", EPOCHS="60", LATE="1", **variables)
    assert (tmp_path / f"{ranks - 1}.1.back").exists()


@pytest.mark.slow
@pytest.mark.parametrize("faults", [["2:6:sum", "5:6:sum"], ["1:6:step", "2:7:forward"]])
def test_several_replicas_may_be_lost(tmp_path, faults):
    check(tmp_path, 6, faults, SHARDS="2")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_eight_losses_of_replicas(tmp_path, seed):
    draw, faults = Random(seed), []
    for begin in (6, 60):
        iteration = begin + draw.randrange(8)
        places = ["forward", "sum", "step", "stepped", *(["evaluation"] if iteration % 5 == 4 else [])]
        faults.append(f"{draw.randrange(4)}:{iteration}:{draw.choice(places)}")
    check(tmp_path, 4, faults, SHARDS="2", RETURNS_AT="40,94", EPOCHS="30")


@pytest.mark.slow
@pytest.mark.parametrize("faults", [["3:6:sum"], ["0:6:stepped"]])
def test_a_rank_of_several_hosts_is_lost_and_comes_back(tmp_path, faults):
    check(tmp_path, 4, faults, hosts=2, RETURNS_AT="40", EPOCHS="20")


@pytest.mark.slow
def test_a_host_is_lost_and_the_ranks_of_the_others_go_on(tmp_path):
    kept, lost = start_on_hosts(2, 2, surviving_ddp.__file__, tmp_path, cwd=tmp_path, EPOCHS="300")
    await_iteration(tmp_path / "3.jsonl", 20)
    kill(lost)
    [printed] = outputs([kept])
    assert "host 1 was silent for 10 s: its ranks count as lost" in printed
    assert "paceline: 2 ranks go on: 0, 1" in printed
    check_notes(tmp_path, 4, {2, 3}, 300)  # no update is in vain if the host is lost during an evaluation


@pytest.mark.slow
@pytest.mark.parametrize("comes_at_once", [False, True])
def test_a_host_that_was_lost_comes_back(tmp_path, comes_at_once):
    kept, lost = start_on_hosts(2, 2, surviving_ddp.__file__, tmp_path, cwd=tmp_path, EPOCHS="60", RETURNS_AT="200")
    await_iteration(tmp_path / "3.jsonl", 20)
    for rank in (2, 3):
        (tmp_path / f"{rank}.0.lost").touch()
    kill(lost)
    if not comes_at_once:
        await_iteration(tmp_path / "1.jsonl", len((tmp_path / "3.jsonl").read_text().splitlines()) // 2 + 10)
    variables = environment(LIVES="1", EPOCHS="60", RETURNS_AT="200")
    again = subprocess.Popen(lost.args, cwd=tmp_path, env=variables, text=True, stdout=subprocess.PIPE)
    printed, _ = outputs([kept, again])
    assert comes_at_once or "host 1 was silent for 10 s: its ranks count as lost" in printed
    check_notes(tmp_path, 4, set(), 60)
    assert all((tmp_path / f"{rank}.1.back").exists() for rank in (2, 3))


@pytest.mark.slow
def test_the_others_go_on_with_a_compiled_model(tmp_path):
    check(tmp_path, 3, ["1:9:sum"], COMPILED="1")


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_ended(tmp_path):
    check(tmp_path, 3, ["1:6:sum"], WITH="SIGSTOP")


@pytest.mark.slow
def test_a_batch_that_runs_out_of_memory_in_backward_is_dealt_again(tmp_path):
    assert check(tmp_path, 2, [], MEMORY="5", EPOCHS="3") == 1
    computed, ended = notes_of(tmp_path)
    sizes = [(len(computed[i][0]["samples"]), ended[i][0]["stepped"]) for i in sorted(ended)]
    assert (6, False) in sizes
    assert max(size for size, is_stepped in sizes if is_stepped) <= 5, "the limit has fallen"


@pytest.mark.slow
def test_a_collective_that_needs_all_ranks_starts_all_again(tmp_path):
    printed = run(tmp_path, 3, "1:7:sum", GATHERS="1")
    assert "allgather needs all ranks, and rank 1 is lost: all ranks are started again" in printed
    assert printed.count("all ranks of this host are started again in ") == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_log_of_a_run_that_a_signal_ends_is_whole(tmp_path, number):
    command = [sys.executable, "-m", "paceline", "run", "--nproc-per-node", "2", surviving_ddp.__file__, tmp_path]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(EPOCHS="1000"))
    await_records(tmp_path / "runs" / "surviving_ddp-1", UpdateMade, 20)
    process.send_signal(number)
    assert process.wait(scaled(60))
    saved = SavedRun(tmp_path / "runs" / "surviving_ddp-1")
    *_, end = saved.history
    assert isinstance(end, RunEnded)
    assert end.outcome is Outcome.INTERRUPTED
    assert pl.replay(saved.path).is_same
