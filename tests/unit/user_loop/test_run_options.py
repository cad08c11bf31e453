"""Options of `attach` that are those of `pl.train`: folders stay where they were given, times are read."""

from dataclasses import fields

import pytest

import paceline as pl
from paceline.core.duration import Duration
from paceline.user_loop.attach import SUPPORTED
from paceline.user_loop.run_options import RunOptions
from paceline.user_loop.server.served_part import OF_THE_SERVER

OF_EACH_RANK = {"ranks", "worker_at_server", "slowness", "threads", "faults", "debug", "groups", "group"}


def test_folders_are_absolute_because_the_run_begins_later(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    options = RunOptions.of({"out": "here", "resume": tmp_path / "there"})
    assert (options.out, options.resume) == (str(tmp_path / "here"), str(tmp_path / "there"))


def test_an_interval_is_text_or_a_duration():
    given = [RunOptions.of({"checkpoint_every": each}) for each in ("updates=3", Duration("updates", 3))]
    assert [each.checkpoint_every for each in given] == [Duration("updates", 3)] * 2


@pytest.mark.parametrize(("given", "address"), [(9464, ("127.0.0.1", 9464)), ("[::]:0", ("::", 0))])
def test_metrics_are_an_address_of_prometheus(given, address):
    pytest.importorskip("prometheus_client")
    [callback] = RunOptions.of({"metrics": given}).callbacks()
    assert isinstance(callback, pl.callbacks.Prometheus)
    assert callback._address == address


def test_wrong_metrics_are_refused_in_the_loop():
    with pytest.raises(pl.UsageError, match="metrics='nine', expected PORT or HOST:PORT"):
        RunOptions.of({"metrics": "nine"})


def test_the_server_has_each_option_of_the_ranks_that_is_not_theirs_alone():
    options = {each.name for each in fields(pl.Torchrun) if each.name != "_"}
    assert options == {*OF_THE_SERVER, *SUPPORTED, *OF_EACH_RANK}
