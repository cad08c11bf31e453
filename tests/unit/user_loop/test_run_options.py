"""Options of `attach` that are those of `pl.train`: folders stay where they were given, times are read."""

from paceline.core.duration import Duration
from paceline.user_loop.run_options import RunOptions


def test_folders_are_absolute_because_the_run_begins_later(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    options = RunOptions.of({"out": "here", "resume": tmp_path / "there"})
    assert (options.out, options.resume) == (str(tmp_path / "here"), str(tmp_path / "there"))


def test_an_interval_is_text_or_a_duration():
    given = [RunOptions.of({"checkpoint_every": each}) for each in ("updates=3", Duration("updates", 3))]
    assert [each.checkpoint_every for each in given] == [Duration("updates", 3)] * 2
