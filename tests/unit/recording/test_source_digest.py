"""The code that all processes of a run have to share: which files count, and what a change of them does."""

import importlib
import shutil
import sys
import zipfile
from functools import partial
from importlib.resources import files
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from msgspec import msgpack
from torch import nn
from torch.utils.data import Subset

import paceline as pl
from paceline.core.stop import Stop
from paceline.engines.distributed.transport.encoded import encoded
from paceline.protocols.protocol import as_plan
from paceline.recording import source_digest as source
from paceline.recording.source_digest import code_of, digest_of_package
from paceline.run.config import RunConfig
from paceline.run.session import job_spec
from ranks import ranks
from tiny_jobs import dataset, sgd, tiny_job

MINE = "def loss(output, target):\n    return output.sum()\n\nclass Data:\n    pass\n"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Make modules that are forgotten afterwards."""
    made = []

    def make(name, text, archive=None):
        folder = tmp_path / "here"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(text)
        where = folder
        if archive:
            where = tmp_path / archive
            with zipfile.ZipFile(where, "w") as file:
                file.write(folder / f"{name}.py", f"{name}.py")
            (folder / f"{name}.py").unlink()
        monkeypatch.syspath_prepend(str(where))
        sys.modules.pop(name, None)
        importlib.invalidate_caches()
        made.append(name)
        return importlib.import_module(name)

    yield make
    for name in made:
        sys.modules.pop(name, None)


def test_any_change_of_a_file_that_defines_a_part_is_reported(module):
    before = code_of([module("my_job", MINE).loss])
    after = code_of([module("my_job", MINE + "# another version\n").loss])
    assert before.keys() == after.keys() == {"paceline", "my_job"}
    assert before["paceline"] == after["paceline"]
    assert before["my_job"] != after["my_job"]


def test_a_file_in_an_archive_counts_as_the_same_file_elsewhere(module):
    assert code_of([module("my_job", MINE).loss]) == code_of([module("my_job", MINE, archive="jobs.zip").loss])


@pytest.mark.parametrize(
    "part",
    [
        lambda my: my.loss,
        lambda my: partial(nn.Sequential, my.loss),
        lambda my: partial(dataset, transform=my.loss),
        lambda my: my.Data,
        lambda my: my.Data(),
        lambda my: [my.Data],
        lambda my: Subset(Subset(my.Data(), [0]), [0]),
        lambda my: {"train": my.loss},
    ],
)
def test_a_part_is_found_wherever_it_is(part, module):
    assert "my_job" in code_of([part(module("my_job", MINE))])


def test_installed_packages_and_unreadable_files_are_ignored(module):
    typed = type("Typed", (), {"__module__": "typed_at_a_prompt"})
    gone = module("gone", MINE)
    Path(gone.__file__).unlink()
    parts = [F.cross_entropy, nn.Linear(2, 3), torch.optim.SGD, pl.jobs.digits, len, "text", 3, None, typed, gone.loss]
    assert code_of(parts).keys() == {"paceline"}


def test_the_script_is_named_by_its_file(monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    in_script = type("InScript", (), {"__module__": "__main__"})
    script = code_of([in_script])[Path(__file__).name]
    assert script == code_of([test_the_script_is_named_by_its_file])[__name__]
    assert code_of([in_script], with_main=False).keys() == {"paceline"}


def test_the_name_of_a_script_that_is_not_utf_8_can_be_sent(monkeypatch, tmp_path):
    script = shutil.copy(__file__, tmp_path / "caf\udce9.py")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    in_script = type("InScript", (), {"__module__": "__main__"})
    assert msgpack.decode(encoded(code_of([in_script]))).keys() == {"paceline", "caf\ufffd.py"}


@pytest.mark.slow
@pytest.mark.parametrize("change", ["text", "name", "none"])
def test_two_checkouts_of_paceline_differ_if_a_file_does(change, tmp_path):
    other = tmp_path / "paceline"
    shutil.copytree(Path(pl.__file__).parent, other, ignore=shutil.ignore_patterns("*.pyc"))
    file = other / "worker" / "parameter_guard.py"
    if change == "text":
        file.write_text(file.read_text() + "# changed\n")
    elif change == "name":
        file.rename(file.with_name("parameter_guards.py"))
    assert (digest_of_package(other) == digest_of_package(files("paceline"))) == (change == "none")
    with zipfile.ZipFile(tmp_path / "paceline.zip", "w") as archive:
        for path in other.rglob("*.py"):
            archive.write(path, path.relative_to(tmp_path))
    assert digest_of_package(zipfile.Path(tmp_path / "paceline.zip", "paceline/")) == digest_of_package(other)


def test_ranks_agree_on_the_code_of_their_job(monkeypatch):
    named = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "PACELINE_TOKEN": "x"}
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    setting = RunConfig(
        job=tiny_job(optimizer=sgd()), plan=as_plan(pl.bsp()), cluster=pl.Torchrun(), stop=Stop(updates=3), seed=1
    )
    agreed = job_spec(setting, nn.Sequential(OfThisFile()))
    assert agreed["code of"].keys() == {"paceline", "tiny_jobs", __name__}


class OfThisFile(nn.Module):
    """A layer that the job names only through its model."""


def another_version():
    source._of_paceline = lambda: "another"


@pytest.mark.slow
def test_a_rank_with_another_version_is_refused_with_what_differs():
    with ranks(2, tiny_job(), protocol="bsp", stop="updates=5") as started:
        started.start(1, prepare=another_version)
        with pytest.raises(
            pl.UsageError, match=r"worker 0 .* differs from rank 0: code of paceline \w{12}, now another"
        ):
            started.serve()
