"""The folder of a run."""

import paceline as pl
from tiny_jobs import tiny_job


def test_a_resumed_run_removes_the_error_of_its_crash(tmp_path):
    asked = {"protocol": "bsp", "cluster": pl.Cluster(2)}
    pl.train(tiny_job(), stop="updates=2", out=tmp_path / "run", **asked)
    error = tmp_path / "run" / "error.txt"
    error.write_text("RunError: out of memory\n")
    pl.train(tiny_job(), stop="updates=4", resume=tmp_path / "run", **asked)
    assert not error.exists()
