"""Errors speak of arguments in Python and of flags on the command line; failures of users' code have a place on top."""

import ast
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline as pl
from paceline.cli import main
from paceline.cli.flags import flags_of, in_flags
from paceline.cli.program import app
from tiny_jobs import tiny_job

SOURCE = Path(pl.__file__).parent
OF_TORCHRUN = {
    "--nproc-per-node",
    "--max-restarts",
    "--rdzv-endpoint",
    "--nnodes",
    "--node-rank",
    "--module",
}  # which have no argument of paceline in their place
EXEMPT = {
    "jobs/lr_options.py": {"--to"},  # `paceline data fetch` has no counterpart in Python
    "report/figures.py": {"--"},  # a dashed line
    "experiments/advise/shares_prediction.py": {"--module", "--nnodes", "--node-rank"},  # of the command that it prints
}
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*|(?<![\w-])--$")

TRAIN = flags_of(app, ["train", "digits"])[1]
RANGE_TEST = flags_of(app, ["lr-range-test"])[1]


def texts(tree):
    """Yield the text of a module that is no docstring."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, documented)]
    alone = [statement for body in bodies for statement in body if isinstance(statement, ast.Expr)]
    passed_over = {id(statement.value) for statement in alone}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in passed_over:
            yield node.value


ON_THE_COMMAND_LINE = {"cli", "diagnostics", "shares"}  # whose advice is typed into a shell; shares: at paceline run
LIBRARY = sorted(path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] not in ON_THE_COMMAND_LINE)


def test_the_library_names_no_flag_of_the_command_line():
    found = {}
    for path in LIBRARY:
        name = path.relative_to(SOURCE).as_posix()
        source = path.read_text(encoding="utf-8")
        if not FLAG.search(source):  # which is faster than parsing it
            continue
        flags = {flag for text in texts(ast.parse(source)) for flag in FLAG.findall(text)}
        found[name] = flags - OF_TORCHRUN - EXEMPT.get(name, set())
    assert {name: flags for name, flags in found.items() if flags} == {}


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            "run exists already; give another folder, or overwrite=True",
            "run exists already; give another folder, or --overwrite",
        ),
        ('type cluster="trace:FILE", or leave it out', "type --cluster trace:FILE, or leave it out"),
        ("type cluster='4*exp(mean=1)'", "type --cluster '4*exp(mean=1)'"),
        (
            "give cluster=4*exp(mean=1), not cluster=torchrun(address=10.0.0.1)",
            "give --cluster '4*exp(mean=1)', not --cluster 'torchrun(address=10.0.0.1)'",
        ),
        ("worker_timeout_s=-1.0, expected seconds > 0", "--worker-timeout-s -1.0, expected seconds > 0"),
        ("seed = -1, expected one", "--seed -1, expected one"),
        ("the job's seed = 3", "the job's seed = 3"),
        ("from the last checkpoint in out=", "from the last checkpoint in --out"),
        ("a run, as out= named it", "a run, as --out named it"),
        ("(out=runs/one.csv): the rest", "(--out runs/one.csv): the rest"),
        ("give out=FOLDER.", "give --out FOLDER."),
        (
            "train: seed='x', expected a whole number, as seed=0",
            "train: --seed x, expected a whole number, as --seed 0",
        ),
        (
            "digits: seed='x', expected a whole number, as seed=0",
            "digits: seed='x', expected a whole number, as seed=0",
        ),
        ("overwrite=False is given", "overwrite=False is given"),
        ("k_sync(k=4, seed=3), torchrun(address=10.0.0.1), f(g(h(seed=1)))", None),
        ("job.seed=3, --seed=3, reseed=3, runs/seed=3, seed==3", None),
        ("cannot read 'seed=3 or': the worker's own", None),
        ("'my:job' raised ValueError: seed=3 is bad", None),
        ("give loss=, eval_loss= or metric= in the stop", None),
        ("lr_is='linear', expected 'total'", None),
    ],
)
def test_arguments_become_flags(message, said):
    assert in_flags(message, TRAIN, "train") == (message if said is None else said)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            "k = [4, 4], expected several different ones, as k=[1, 4, 8]",
            "--k 4,4, expected several different ones, as --k 1,4,8",
        ),
        ("quorum k = 0, expected a whole number >= 1", None),
        ("k_sync: k=2.5, expected a whole number", None),
        ("expected 25%, updates=100, epochs=2 or seconds=60", None),
        ("updates=0 is not a whole number in [1, inf)", "--updates 0 is not a whole number in [1, inf)"),
        (
            "lowest = 1.0 and highest = 0.1; expected rates that rise",
            "--lowest 1.0 and --highest 0.1; expected rates that rise",
        ),
    ],
)
def test_names_shared_with_knobs_and_durations_are_kept(message, said):
    assert in_flags(message, RANGE_TEST, "lr-range-test") == (message if said is None else said)


@given(st.sampled_from(sorted(TRAIN)), st.integers() | st.floats() | st.text("abc,=() '-", max_size=9))
def test_an_argument_with_a_value_becomes_its_flag_except_within_brackets(name, value):
    assert in_flags(f"give {name}={value!r}, or", TRAIN).startswith(f"give {TRAIN[name]} ")
    inside = f"{name}(k={name}, {name}=3)"
    assert in_flags(inside, TRAIN) == inside


@given(st.text("ab'\"()[]=., \n-:", max_size=40))
def test_text_without_an_argument_stays_as_it_is(text):
    assert in_flags(text, TRAIN, "train") == text


@pytest.fixture
def paceline(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["paceline", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code or 0, capsys.readouterr().err

    return run


def begun(paceline, *options, protocol="bsp", cluster="2*exp(mean=1)", stop="updates=3"):
    return paceline("train", "digits", "--protocol", protocol, "--cluster", cluster, "--stop", stop, *options)


def python_train(**changes):
    given = {"protocol": "bsp", "cluster": pl.Cluster(2), "stop": "updates=3", **changes}
    with pytest.raises(pl.PacelineError) as refusal:
        pl.train(tiny_job(), **given)
    return str(refusal.value)


def test_another_protocol(paceline):
    assert begun(paceline, "--out", "run")[0] == 0
    status, said = paceline("train", "--resume", "run", "--protocol", "asp", "--stop", "updates=5")
    assert (status, "give --allow-change" in said, "allow_change" in said) == (2, True, False)


@pytest.mark.parametrize(
    ("changes", "python", "flag"),
    [
        (
            {"worker_timeout_s": -1.0},
            "worker_timeout_s=-1.0, expected seconds > 0",
            "--worker-timeout-s -1.0, expected",
        ),
        (
            {"evaluate_every": "soon"},
            "'soon' is no point of a run",
            "'soon' is no point of a run; expected 25%, updates=",
        ),
    ],
)
def test_a_wrong_value(paceline, changes, python, flag):
    (name, value), *_ = changes.items()
    assert python in python_train(**changes)
    assert flag in begun(paceline, f"--{name.replace('_', '-')}", value)[1]


def test_censored(paceline):
    assert "give --cluster trace:FILE" in begun(paceline, "--censored", "km")[1]


def test_a_run_without_measured_steps(paceline, tmp_path):
    assert begun(paceline, "--out", "run")[0] == 0
    status, said = paceline("advise", "run")
    assert (status, "with --measure-steps" in said) == (2, True)
    with pytest.raises(pl.UsageError, match="with measure_steps=True"):
        pl.advise(tmp_path / "run")


FAILING = """
from dataclasses import replace
from paceline.jobs import load_job

def fail(output, target):
    raise {error}("my loss, seed=3")

def job():
    return replace(load_job("digits"), loss=fail)
"""


@pytest.mark.parametrize("error", ["ValueError", "FileNotFoundError", "KeyError"])
def test_the_location_of_a_failure_is_above_the_traceback(paceline, tmp_path, monkeypatch, error):
    monkeypatch.syspath_prepend(tmp_path)
    module = f"failing_{error.lower()}"
    (tmp_path / f"{module}.py").write_text(FAILING.format(error=error))
    status, said = paceline(
        "train", f"{module}:job", "--protocol", "bsp", "--cluster", "2*exp(mean=1)", "--stop", "updates=3"
    )
    place, traceback, *_, last = said.splitlines()
    assert status == 1
    assert re.fullmatch(r"paceline: job .* failed for worker \d, draw 1, after update 0:", place)
    assert traceback == "Traceback (most recent call last):"
    assert f"{module}.py" in said
    assert last.startswith(error)
    assert "seed=3" in last  # the user's own words
    assert said.count("failed for worker") == 1


def test_a_command_names_no_flag_that_it_lacks(paceline):
    assert begun(paceline, "--out", "run", protocol="k_sync(k=1)", stop="updates=30")[0] == 0
    assert paceline("trace", "run")[0] == 0
    asked = ("digits", "--cluster", "trace:trace.csv", "--stop", "updates=3")
    assert "give --censored km to draw" in paceline("train", *asked, "--protocol", "bsp")[1]
    assert 'censored="km" to draw' in paceline("compare", *asked, "--protocols", "bsp")[1]


def test_an_error_of_the_program_itself_is_not_hidden(monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(sys.modules["paceline.cli.program"], "command_of", lambda _: broken)
    with pytest.raises(ZeroDivisionError):
        main()


OPTIONS = {"protocol": "bsp", "cluster": "2*exp(mean=1)", "stop": "updates=2"}


def said_by_the_program(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
    with pytest.raises(SystemExit):
        main()
    return " ".join(capsys.readouterr().err.split())


def test_a_folder_that_exists_already(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    pl.train(tiny_job(), out="run", **OPTIONS)
    with pytest.raises(pl.UsageError, match=r"give another folder, or overwrite=True$"):
        pl.train(tiny_job(), out="run", **OPTIONS)
    options = [word for name, value in OPTIONS.items() for word in (f"--{name}", value)]
    said = said_by_the_program(monkeypatch, capsys, "train", "digits", *options, "--out", "run")
    assert said.endswith("give another folder, or --overwrite")


def test_a_folder_that_is_missing(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pl.UsageError, match=r"expected the folder of a run, as given with out=$"):
        pl.replay("run")
    assert said_by_the_program(monkeypatch, capsys, "replay", "run").endswith("as given with --out")


def test_a_file_in_place_of_a_folder(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(pl.UsageError, match=r"run is a file; expected the folder of a run"):
        pl.replay(tmp_path / "run")


def test_a_failed_comparison_names_the_argument(tmp_path):
    def broken(output, target):
        raise ValueError("broken")

    with pytest.raises(pl.RunError, match=r"repeat the same call with out='.*cmp' to run only these again"):
        pl.compare(
            tiny_job(loss=broken),
            protocols="bsp",
            cluster=pl.Cluster(2),
            stop="updates=2",
            seeds=1,
            out=tmp_path / "cmp",
            processes=1,
        )


def test_the_error_for_an_object_with_a_multi_line_repr_is_one_line():
    job = tiny_job()
    with pytest.raises(pl.UsageError) as refusal:
        tiny_job(optimizer=job.optimizer(job.model().parameters()))
    assert "\n" not in str(refusal.value)


def test_an_error_never_proposes_a_batch_size_of_zero():
    with pytest.raises(pl.UsageError, match=r"batch_size=1.5, expected a whole number, such as batch_size=32"):
        tiny_job(batch_size=1.5)
