"""Record of a balanced run: its folder, also after a restart, and where it cannot be written."""

from urllib.error import URLError
from urllib.request import urlopen

import pytest

import paceline as pl
from paceline.core.events import Outcome
from paceline.core.records import (
    DecisionMade,
    RunEnded,
    RunResumed,
    RunStarted,
    UpdateMade,
    WorkerJoined,
    WorkerLost,
)
from paceline.errors import UsageError
from paceline.jobs import load_job
from paceline.policies.share_limits import ShareLimits
from paceline.recording.run_folder import SavedRun
from paceline.recording.timed_updates import TimedUpdate, timed_updates
from paceline.shares.gain import Gain
from paceline.shares.log_so_far import LogSoFar, end_log
from selections import parametrize_few
from share_runs import BATCH, RANKS, record_in, train

EQUAL = (BATCH,) * RANKS


def kinds(folder):
    rare = (RunStarted, RunResumed, DecisionMade, RunEnded)
    return [type(record).__name__ for record in SavedRun(folder).history if isinstance(record, rare)]


def test_the_folder_has_every_update_and_decision_and_replays(tmp_path):
    record = record_in(tmp_path / "run")
    train(record, 40)
    record.end(Outcome.STOPPED, "the script has ended")
    history = SavedRun(tmp_path / "run").history
    assert kinds(tmp_path / "run") == ["RunStarted", "DecisionMade", "RunEnded"]
    gain = Gain.of(history)
    assert gain.updates == record.gain.updates == 40
    assert str(gain) == str(record.gain)
    assert gain.equal_s == pytest.approx(record.gain.equal_s)
    assert gain.ratio > 1.2
    [decision] = history.of(DecisionMade)
    after = next(update.samples for update in timed_updates(history) if len({*update.samples}) > 1)
    assert [*decision.numbers.values()] == list(after)
    assert pl.replay(tmp_path / "run").is_same
    assert record.line.endswith(f"; paceline report {tmp_path / 'run'}")


def test_decisions_by_the_times_of_many_fast_updates_are_replayed(tmp_path):
    record = record_in(tmp_path / "run")
    train(record, 300, sample_s=1e-4)
    record.end(Outcome.STOPPED, "")
    history = SavedRun(tmp_path / "run").history
    assert len(history.of(DecisionMade)) == 1
    [first] = [i for i, update in enumerate(timed_updates(history)) if len({*update.samples}) > 1][:1]
    assert 20 < first < 50  # with the second exchange, of 31 updates
    assert pl.replay(tmp_path / "run").is_same


def test_limits_of_the_shares_are_replayed(tmp_path):
    record = record_in(tmp_path / "run")
    train(record, 40, most=(18, 22, 24))
    record.end(Outcome.STOPPED, "")
    limits, shares = SavedRun(tmp_path / "run").history.of(DecisionMade)
    assert limits.reason == "at most 18, 22, 24 samples by memory"
    assert shares.numbers["0"] == 18
    assert pl.replay(tmp_path / "run").is_same


def test_a_run_that_fails_right_after_a_decision_has_a_whole_log(tmp_path):
    record = record_in(tmp_path / "run")
    train(record, 40)
    record.limited(record._ended_s + 1.0, ShareLimits((BATCH,) * RANKS))
    record.end(Outcome.FAILED, "")
    assert kinds(tmp_path / "run")[-2:] == ["DecisionMade", "RunEnded"]


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


def test_advice_on_the_folder_says_what_was_gained(tmp_path):
    train(record := record_in(tmp_path / "run"), 30)
    record.end(Outcome.STOPPED, "")
    text = str(pl.advise(tmp_path / "run", protocols=["bsp", "k_sync(k=2)"])).replace("\n", " ")
    assert f"with the parameters of equal shares: {record.gain}." in text
    assert "measure_steps" not in text


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


def test_metrics_count_the_updates_with_and_without_a_folder(tmp_path):
    for folder in (None, tmp_path / "run"):
        record = record_in(folder, metrics="0")
        train(record, 40)
        url, end = record._metrics.url, record._ended_s + 2
        record.add(
            TimedUpdate(
                began_s=0.0,
                ended_s=end,
                ranks=range(3),
                samples=[16] * 3,
                seconds=[0.1] * 3,
                work=[16] * 3,
                equal_work=[16] * 3,
            )
        )  # later than a second
        with urlopen(f"{url}/metrics") as page:
            found = page.read().decode()
        assert "paceline_updates_total 41.0" in found
        assert "paceline_live_workers 3.0" in found
        record.end(Outcome.STOPPED, "")
        with pytest.raises(URLError):
            urlopen(f"{url}/metrics")


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


def killed(record):
    """Leave a record as a process does that is killed: what it has not passed on is lost."""
    record._folder.settle()
    record._folder._lock.release()


@parametrize_few("after", [0, 3, 4, 27], ids=str, keep=1)
def test_another_rank_goes_on_with_the_log_of_one_that_is_lost_and_it_replays(tmp_path, after):
    first, heir = (record_in(tmp_path / "run", is_writer=each, max_share=2.0) for each in (True, False))
    for record in (first, heir):
        train(record, 30)
        record.regroup(record._ended_s + 1, EQUAL, inherits=False)  # an update was given up
        train(record, after)
    killed(first)
    assert LogSoFar(tmp_path / "run", with_end=True).updates < max(1, after)
    heir.regroup(heir._ended_s + 1, (0, 24, 24), inherits=True)
    train(heir, 12, lost=(0,))
    heir.regroup(heir._ended_s + 1, EQUAL, inherits=False)
    train(heir, 30)
    heir.end(Outcome.STOPPED, "")
    history = SavedRun(tmp_path / "run").history
    assert [update.version for update in history.of(UpdateMade)] == list(range(1, 73 + after))
    assert [len(update.ranks) for update in timed_updates(history)] == [3] * (30 + after) + [2] * 12 + [3] * 30
    assert [each.numbers for each in history.of(DecisionMade)].count({"0": 0.0, "1": 32.0, "2": 16.0}) == 1
    [lost], [joined] = history.of(WorkerLost), history.of(WorkerJoined)
    assert lost.worker == joined.worker == 0
    assert lost.now_s < joined.now_s
    assert str(Gain.of(history)) == str(heir.gain)
    assert heir.gain.updates == 72 + after
    assert pl.replay(tmp_path / "run").is_same
    assert pl.replay(tmp_path / "run").updates == 72 + after


def test_a_replay_finds_that_ranks_did_not_begin_anew(tmp_path):
    train(record := record_in(tmp_path / "run"), 30)
    record.regroup(record._ended_s + 1, EQUAL, inherits=False)
    train(record, 30)
    record.end(Outcome.STOPPED, "")
    log = tmp_path / "run" / "events.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if '"kind":"ranks"' not in line))
    assert pl.replay(tmp_path / "run").difference


def test_an_end_that_a_lost_rank_has_written_is_not_that_of_the_run(tmp_path):
    first, heir = record_in(tmp_path / "run"), record_in(tmp_path / "run", is_writer=False)
    for record in (first, heir):
        train(record, 30)
    first.end(Outcome.FAILED, "ValueError")
    heir.regroup(heir._ended_s + 1, (0, 24, 24), inherits=True)
    train(heir, 5, lost=(0,))
    heir.end(Outcome.STOPPED, "")
    [end] = SavedRun(tmp_path / "run").history.of(RunEnded)
    assert end.outcome is Outcome.STOPPED
    assert heir.gain.updates == 35


@pytest.mark.parametrize(
    ("status", "outcome", "reason"),
    [(143, Outcome.INTERRUPTED, "SIGTERM"), (130, Outcome.INTERRUPTED, "SIGINT"), (1, Outcome.FAILED, "exit status 1")],
)
def test_the_launcher_ends_a_log_that_no_rank_has_ended(tmp_path, status, outcome, reason):
    train(record := record_in(tmp_path / "run", launch="a"), 30)
    killed(record)
    with (tmp_path / "run" / "events.jsonl").open("a") as file:
        file.write('{"event":"cut')
    end_log(tmp_path / "run", "b", status)
    assert not LogSoFar(tmp_path / "run", with_end=True).has_ended
    end_log(tmp_path / "run", "a", status)
    end_log(tmp_path / "run", "a", 0)
    [end] = SavedRun(tmp_path / "run").history.of(RunEnded)
    assert (end.outcome, end.reason) == (outcome, reason)
    assert end.busy_s > 0
    assert pl.replay(tmp_path / "run").is_same


def test_a_folder_that_the_launcher_cannot_end_is_named(tmp_path, capsys):
    train(record_in(tmp_path / "run", launch="a"), 30)  # still locked
    end_log(tmp_path / "run", "a", 143)
    end_log(tmp_path / "none", "a", 143)
    assert capsys.readouterr().err.count("the log of the run has no end: another run is writing") == 1
