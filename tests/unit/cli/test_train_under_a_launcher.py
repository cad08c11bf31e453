"""`paceline train` as a rank that a launcher may start again."""

import pytest

import paceline as pl
from paceline.cli.log_handler import logging_to_terminal
from paceline.cli.program import app
from paceline.clusters.launch_settings import LaunchSettings

SETTINGS = LaunchSettings(
    nproc_per_node=1,
    nnodes=2,
    node_rank=0,
    master="127.0.0.1",
    port=29400,
    max_restarts=-1,
    token="a token of two ranks",
)


@pytest.mark.parametrize(
    ("rank", "options", "is_refused"), [(0, [], True), (0, ["--out", "run"], False), (1, [], False)]
)
def test_only_rank_0_needs_a_folder(rank, options, is_refused, monkeypatch, tmp_path):
    class TrainedError(Exception):
        pass

    def train(*_, **__):
        raise TrainedError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pl, "train", train)
    for name, value in SETTINGS.environment(rank, 29400, restarts=0).items():
        monkeypatch.setenv(name, value)
    words = ["train", "digits", "--protocol", "bsp", "--stop", "updates=1", "--cluster", "torchrun", *options]
    refused = pytest.raises(pl.UsageError, match="give --out FOLDER")
    with logging_to_terminal(), refused if is_refused else pytest.raises(TrainedError):
        app(words, standalone_mode=False)
