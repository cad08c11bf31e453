"""Record of a balanced run: its folder, also after a restart, and where it cannot be written."""

import random

import pytest
import torch.distributed as dist

import paceline as pl
from paceline.core.events import Outcome
from paceline.core.records import DecisionMade, RunEnded, RunResumed, RunStarted, UpdateMade
from paceline.errors import UsageError
from paceline.jobs import load_job
from paceline.policies.shares import Pieces, ShareBalancer
from paceline.recording.run_folder import SavedRun
from paceline.recording.script_runs import SCRIPT
from paceline.recording.timed_updates import TimedUpdate, timed_updates
from paceline.shares.gain import Gain
from paceline.shares.run_record import RunRecord
from paceline.shares.settings import BalanceSettings

RANKS, BATCH = 3, 16
FOUND = {"batch_size": BATCH, "parameters": 7, SCRIPT: {"model": "Net"}}


@pytest.fixture(autouse=True)
def _backend(monkeypatch):
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")


def record_in(folder, **options):
    return RunRecord(BalanceSettings(out=folder and str(folder), **options), FOUND, RANKS, 1)


def train(record, count, slow=2.0, seed=0):
    """Make updates as a balancer does: the times of one are known when the next one ends."""
    policy, draws = ShareBalancer(RANKS, Pieces(BATCH)), random.Random(seed)
    ended_s, before = record._ended_s, None
    for _ in range(count):
        factors = (1.0, 1.0, slow)
        seconds = [0.01 * s * f * draws.uniform(0.98, 1.02) for s, f in zip(policy.shares, factors, strict=True)]
        ended_s += max(seconds) + 0.01
        update = TimedUpdate(0.0, ended_s, policy.shares, seconds, policy.shares, [BATCH] * RANKS)
        if before is not None:
            record.add(before)
            if decision := policy.decide(before.work, before.seconds):
                record.decided(ended_s, decision)
        before = update
    record.add(before)


def kinds(folder):
    rare = (RunStarted, RunResumed, DecisionMade, RunEnded)
    return [type(record).__name__ for record in SavedRun(folder).history if isinstance(record, rare)]


def test_the_folder_has_every_update_and_decision_and_replays(tmp_path):
    record = record_in(tmp_path / "run")
    train(record, 40)
    record.end(Outcome.STOPPED, "the script has ended")
    history = SavedRun(tmp_path / "run").history
    assert kinds(tmp_path / "run") == ["RunStarted", "DecisionMade", "RunEnded"]
    gain = Gain()
    for update in timed_updates(history):
        gain.add(update)
    assert gain.updates == record.gain.updates == 40
    assert str(gain) == str(record.gain)
    assert gain.equal_s == pytest.approx(record.gain.equal_s)
    assert gain.ratio > 1.2
    [decision] = history.of(DecisionMade)
    after = next(update.samples for update in timed_updates(history) if len({*update.samples}) > 1)
    assert [*decision.numbers.values()] == list(after)
    assert pl.replay(tmp_path / "run").is_same
    assert record.line.endswith(f"; paceline report {tmp_path / 'run'}")


@pytest.mark.parametrize("line", [0, 1])
def test_a_replay_finds_a_decision_that_was_changed_or_left_out(tmp_path, line):
    record = record_in(tmp_path / "run")
    train(record, 40)
    record.end(Outcome.STOPPED, "")
    log = tmp_path / "run" / "events.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    place = next(i for i, text in enumerate(lines) if '"shares"' in text)
    lines[place] = lines[place].replace('"2":', '"2":1') if line else ""
    log.write_text("".join(lines))
    found = pl.replay(tmp_path / "run")
    assert "the replay has the shares" in found.difference


def test_ranks_that_start_again_continue_the_log(tmp_path, monkeypatch):
    record = record_in(tmp_path / "run", launch="a")
    train(record, 30)
    record.end(Outcome.FAILED, "ValueError")
    with (tmp_path / "run" / "events.jsonl").open("a") as file:
        file.write('{"event":"cut')
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = record_in(tmp_path / "run", launch="a")
    train(again, 30)
    again.end(Outcome.STOPPED, "")
    made = SavedRun(tmp_path / "run").history.of(UpdateMade)
    assert [update.version for update in made] == list(range(1, 61))
    assert again.gain.updates == 60
    assert again.gain.seconds == pytest.approx(made[-1].now_s)
    assert kinds(tmp_path / "run").count("RunResumed") == 1
    assert pl.replay(tmp_path / "run").is_same


@pytest.mark.parametrize(("restarts", "launch"), [("0", "a"), ("1", "b")])
def test_the_run_of_another_launcher_is_not_continued(tmp_path, monkeypatch, capsys, restarts, launch):
    train(first := record_in(tmp_path / "run", launch="a"), 5)
    first.end(Outcome.STOPPED, "")
    before = (tmp_path / "run" / "events.jsonl").read_bytes()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    record = record_in(tmp_path / "run", launch=launch)
    train(record, 5)
    record.end(Outcome.STOPPED, "")
    assert (tmp_path / "run" / "events.jsonl").read_bytes() == before
    assert "the run is not recorded" in capsys.readouterr().err
    assert record.line == f"paceline: {record.gain}"


def test_a_folder_that_cannot_be_written_ends_the_record_alone(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    record = record_in(tmp_path / "file" / "run")
    train(record, 5)
    record.end(Outcome.STOPPED, "")
    assert record.gain.updates == 5
    assert capsys.readouterr().err.count("the run is not recorded") == 1


def test_without_a_folder_only_the_gain_is_kept():
    train(record := record_in(None), 5)
    record.end(Outcome.STOPPED, "")
    assert record.line == f"paceline: {record.gain}"
    assert record_in(None).line == ""


def test_a_process_that_was_forked_does_not_end_the_folder(tmp_path, monkeypatch):
    train(record := record_in(tmp_path / "run"), 5)
    with monkeypatch.context() as context:
        context.setattr("os.getpid", lambda: -1)
        record.end(Outcome.STOPPED, "")
    record.end(Outcome.FAILED, "own")
    [end] = SavedRun(tmp_path / "run").history.of(RunEnded)
    assert end.reason == "own"


def test_the_run_of_a_script_is_not_resumed(tmp_path):
    train(record := record_in(tmp_path / "run"), 5)
    record.end(Outcome.STOPPED, "")
    with pytest.raises(UsageError, match="which has its own checkpoints: start it again"):
        pl.train(
            load_job("digits"), protocol=pl.bsp(), cluster=pl.Cluster(2), stop="updates=2", resume=tmp_path / "run"
        )
