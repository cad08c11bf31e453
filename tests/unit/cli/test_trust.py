"""A folder of another user is not believed: what it names is imported only if the user trusts it."""

import json
import os
import pwd
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.cli import main
from paceline.cli.saved_options import CODE, COMMAND
from paceline.cli.trust import _writable_by_others, code_of_job
from paceline.recording.source_digest import code_behind
from selections import parametrize_few

JOB = """
import pathlib
pathlib.Path("imported").touch()
from tiny_jobs import tiny_job
def make():
    return tiny_job()
"""
TYPED = ["--protocol", "bsp", "--cluster", "2*exp(mean=1)", "--stop", "updates=3", "--out", "run"]


@pytest.fixture
def paceline(monkeypatch, capsys, tmp_path):
    """Run the program in an empty folder, as a new process would, with the job my_job:make."""
    (tmp_path / "my_job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delenv("PACELINE_TRUST", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def run(*arguments):
        for name in [name for name in sys.modules if name.partition(".")[0] in {"my_job", "my_package"}]:
            del sys.modules[name]
        (tmp_path / "imported").unlink(missing_ok=True)
        monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code or 0, capsys.readouterr().err

    return run


@pytest.fixture
def begun(paceline):
    """Return the program, once it has made a run of my_job in the folder run."""
    assert paceline("train", "my_job:make", *TYPED)[0] == 0
    return paceline


def resume(paceline, *arguments):
    return paceline("train", *arguments, "--resume", "run", "--stop", "updates=6")


def was_imported():
    return os.path.exists("imported")


def refused(paceline, *words):
    status, said = resume(paceline)
    assert status == 2
    assert not was_imported()
    assert said.splitlines()[0].startswith("paceline: run names the job ")
    for word in (*words, "add --trust (or set PACELINE_TRUST=1)"):
        assert word in said.splitlines()[1]
    assert len(said.splitlines()) == 2


def rewrite(**changes):
    path = Path("run", COMMAND)
    typed = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in typed.items() if value is not None}))


def test_a_run_of_the_same_user_and_code_resumes_and_lists_its_imports(begun, tmp_path):
    status, said = resume(begun)
    assert status == 0
    assert said.splitlines()[0] == f"paceline: run names the job my_job:make, imported from {tmp_path}/my_job.py"


def test_a_changed_job_file_is_refused_before_it_is_imported(begun, tmp_path):
    (tmp_path / "my_job.py").write_text(JOB + "# changed\n")
    refused(begun, f"{tmp_path}/my_job.py has changed since the run began: digest ", ", now ")


@parametrize_few("way", ["--trust", "PACELINE_TRUST", "typed"], keep=1)
def test_a_trusted_changed_job_file_is_imported_and_recorded(way, begun, tmp_path, monkeypatch):
    (tmp_path / "my_job.py").write_text(JOB + "# changed\n")
    if way == "PACELINE_TRUST":
        monkeypatch.setenv(way, "1")
    assert resume(begun, *{"--trust": ["--trust"], "typed": ["my_job:make"]}.get(way, []))[0] == 0
    monkeypatch.delenv("PACELINE_TRUST", raising=False)
    assert resume(begun)[0] == 0


def test_the_folder_of_another_user_is_refused(begun, monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    refused(begun, f"run belongs to user {os.getuid()}, and this is user 12345")


@parametrize_few("path", ["run", f"run/{COMMAND}"], keep=1)
def test_a_world_writable_file_is_refused(path, begun):
    os.chmod(path, 0o777)
    refused(begun, f"{path} can be written by every user")


@parametrize_few("path", ["run", f"run/{COMMAND}"], keep=1)
def test_a_file_that_a_group_of_others_may_write_is_refused(path, begun, monkeypatch):
    os.chmod(path, 0o775)
    user = pwd.getpwuid(os.geteuid())
    own, shared = (SimpleNamespace(gr_name=user.pw_name, gr_mem=members) for members in ([], ["another"]))
    monkeypatch.setattr("grp.getgrgid", lambda number: shared)
    refused(begun, f"{path} can be written by the members of group {os.stat(path).st_gid}; type chmod g-w")
    monkeypatch.setattr("grp.getgrgid", lambda number: own)
    assert not _writable_by_others(Path(path))


@parametrize_few(
    ("job", "words"),
    [
        ("subprocess:run(args='touch imported',shell=true)", "subprocess, which is not a module of yours"),
        ("torch.hub:load(repo_or_dir='a/b',model='c')", "torch.hub, which is not a module of yours"),
        ("os.path:join", "os.path, which is not a module of yours"),
        ("typer:launch(url='imported')", "typer, which is not a module of yours"),
    ],
    keep=1,
)
def test_code_outside_user_modules_is_refused(job, words, begun):
    rewrite(job=job, **{CODE: code_of_job(job)})
    refused(begun, words)


def test_another_module_than_the_recorded_one_is_refused(begun, tmp_path):
    (tmp_path / "my_job2.py").write_text(JOB)
    rewrite(job="my_job2:make")
    refused(begun, "my_job2.py has changed since the run began: digest None")


def test_code_inside_the_run_folder_is_refused(begun, tmp_path, monkeypatch):
    (tmp_path / "my_job.py").rename(tmp_path / "run/my_job.py")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "run"), *sys.path])
    refused(begun, "run/my_job.py, which would be imported, lies in the folder of the run")


def test_a_folder_without_digests_is_refused(begun):
    rewrite(**{CODE: None})
    refused(begun, "was written by an earlier paceline, without a digest of the code of its job")


def test_a_job_of_paceline_needs_no_trust(paceline, monkeypatch):
    assert paceline("train", "digits", *TYPED)[0] == 0
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    status, said = resume(paceline)
    assert (status, "names the job" in said) == (0, False)


def test_trust_applies_only_to_a_resume_and_the_variable_is_1_or_unset(begun, monkeypatch):
    assert begun("train", "my_job:make", *TYPED, "--trust")[1].startswith("paceline: --trust only works with --resume")
    monkeypatch.setenv("PACELINE_TRUST", "maybe")
    status, said = resume(begun)
    assert (status, "PACELINE_TRUST='maybe', expected 1" in said) == (2, True)


@parametrize_few("command", ["report", "trace", "replay", "advise"], keep=1)
def test_other_commands_import_nothing_of_a_folder(command, begun):
    begun(command, "run")
    assert not was_imported()


def test_packages_are_located_without_execution(tmp_path, monkeypatch):
    inner = tmp_path / "my_package/space/inner"
    inner.mkdir(parents=True)
    for file in (tmp_path / "my_package/__init__.py", inner / "__init__.py", inner / "job.py"):
        file.write_text("raise RuntimeError('executed')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    found = code_behind("my_package.space.inner.job")
    assert {name: file.path.relative_to(tmp_path).as_posix() for name, file in found.items()} == {
        "my_package": "my_package/__init__.py",
        "my_package.space.inner": "my_package/space/inner/__init__.py",
        "my_package.space.inner.job": "my_package/space/inner/job.py",
    }
    assert list(code_behind("my_package.space.missing")) == ["my_package"]
    assert code_behind("nowhere.at.all") == {}
    assert "my_package" not in sys.modules
