"""Damaged or absurd files: each command refuses each file in one line, quickly and without a traceback."""

import json
import os
import random
import shutil
import sys
import time
import warnings
from hashlib import sha256
from itertools import cycle
from pathlib import Path

import pytest
import safetensors.torch
import torch

import paceline as pl
from machine_speed import scaled
from paceline.checkpoint.store import STATE, SUMS, TENSORS
from paceline.cli import main
from paceline.recording.run_folder import CHECKPOINTS, ERROR, EVENTS, RUN, SavedRun
from selections import parametrize_few
from tiny_jobs import tiny_job

LIMIT_S = scaled(1.5)  # of processor time: a second, and some for a slow machine
OPTIONS = {"protocol": "k_sync(k=2)", "cluster": pl.Cluster(3), "stop": "updates=30"}
RECORDED = "time_s,accuracy,setting\n" + "".join(f"{9 + i},0.9,{share}\n" for i in range(9) for share in (0, 0.5, 1))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a folder with a run, a trace, a cluster file, a timing file and recorded runs."""
    pl.jobs.digits()  # its first import takes seconds
    here = tmp_path_factory.mktemp("made")
    result = pl.train(tiny_job(), out=here / "run", measure_steps=True, **OPTIONS)
    typed = {"job": "digits", "protocol": "bsp", "cluster": "2*exp(mean=1)", "stop": "updates=3"}
    (here / "run/command.json").write_text(json.dumps(typed))
    pl.timing.Trace.of(result).to_csv(here / "trace.csv")
    (here / "cluster.toml").write_text('workers = 3\ntiming = "exp(mean=1)"\n[network]\nlatency_s = 0.1\n')
    (here / "timing.toml").write_text(
        'job = "digits"\nmodel = "x"\nbatch_size = 32\nworkers = 2\nfirst = "bsp"\nthen = "asp"\nfraction = 0.5\n'
    )
    (here / "recorded.csv").write_text(RECORDED)
    return here


@pytest.fixture
def paceline(monkeypatch, capsys, tmp_path, made):
    """Run the program beside copies of those files; return its exit status, stderr and processor time."""
    for path in made.iterdir():
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, tmp_path / path.name)
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
        start_s = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(SystemExit) as end:
                main()
        return end.value.code or 0, capsys.readouterr().err, time.process_time() - start_s

    return run


TRAIN = ("train", "digits", "--stop", "updates=2", "--out", "new")
READERS = {
    f"run/{RUN}": [
        ("report", "run"),
        ("replay", "run"),
        ("trace", "run", "--overwrite"),
        ("advise", "run"),
        ("train", "--resume", "run"),
    ],
    f"run/{EVENTS}": [
        ("report", "run"),
        ("replay", "run"),
        ("trace", "run", "--overwrite"),
        ("advise", "run"),
        ("train", "--resume", "run"),
    ],
    "run/command.json": [("train", "--resume", "run")],
    "trace.csv": [(*TRAIN, "--protocol", "bsp", "--cluster", "trace:trace.csv"), ("advise", "trace.csv")],
    "cluster.toml": [(*TRAIN, "--protocol", "bsp", "--cluster", "cluster.toml")],
    "timing.toml": [(*TRAIN, "--protocol", "sync_switch(timing=timing.toml)", "--cluster", "2*exp(mean=1)")],
    "recorded.csv": [("search-cost", "recorded.csv")],
}
CASES = [(file, command) for file, commands in READERS.items() for command in commands]


def make_absurd(path, what):
    match what:
        case "endless":
            path.symlink_to("/dev/zero")
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "huge":
            with path.open("wb") as file:
                file.truncate(1 << 40)
        case "link to itself":
            path.symlink_to(path.name)
        case bytes():
            path.write_bytes(what)


ABSURD = {
    "endless": "endless",
    "pipe": "pipe",
    "folder": "folder",
    "huge": "huge",
    "link to itself": "link to itself",
    "empty": b"",
    "zeros": bytes(1000),
    "not text": b"\xff\xfe\x80" * 100,
    "deep lists": b"[" * 100_000,
    "deep mappings": b'{"a":' * 100_000,
    "deep tables": b"a = " + b"{a = " * 10_000,
    "long key": b"a." * 20_000 + b"a = 1",
    "long line": b"x" * 3_000_000,
    "a number": b"17\n",
    "too large a number": b'{"seed": 1e999, "workers": 1e999}\n',
    "long number": b'{"workers": ' + b"9" * 9000 + b"}\n",
    "a key twice": b'{"job": "a", "job": "b"}\n',
    "a list": b"[[]]\n",
    "null": b"null\n",
}


def assert_refused(status, stderr, took_s):
    assert status in (1, 2), stderr
    assert "Traceback" not in stderr, stderr
    assert stderr.count("\n") == 1, stderr
    assert stderr.startswith("paceline: ")
    assert len(stderr) < 1000
    assert took_s < LIMIT_S


def refused(paceline, file, absurd, command):
    """Put absurd content into a file, check that a command refuses it, and put the file back."""
    if file == f"run/{EVENTS}" and absurd in ("empty", "long line"):
        return  # the log of a run that has only begun, and a line that is named and left out
    path = Path(file)
    kept = path.rename("kept")
    content = ABSURD[absurd]
    is_log = file.endswith(EVENTS) and isinstance(content, bytes)
    make_absurd(path, content + b"\n" if is_log else content)  # the last line may always be cut short
    assert_refused(*paceline(*command))
    path.rmdir() if absurd == "folder" else path.unlink()
    kept.rename(path)


@parametrize_few("file", READERS, keep=1)
def test_absurd_files_are_refused_in_one_line(file, paceline):
    for absurd, command in zip(ABSURD, cycle(READERS[file])):
        refused(paceline, file, absurd, command)


@pytest.mark.slow
@pytest.mark.parametrize(("file", "command"), CASES, ids=[f"{file}-{command[0]}" for file, command in CASES])
def test_absurd_files_are_refused_by_every_command(file, command, paceline):
    for absurd in ABSURD:
        refused(paceline, file, absurd, command)


START = '{"event":"run_started","now_s":0.0,"workers":3,"memory":""}\n'
END = '{"event":"run_ended","now_s":9.0,"outcome":"updates","reason":"","busy_s":1.0,"live_s":1.0}\n'
UPDATE = (
    '{"event":"update_made","now_s":%s,"version":%s,"k":1,"workload":1,"samples":8,"loss":1.0,"learning_rate":0.1,'
    '"staleness":0.0,"max_staleness":0,"reason":"","busy_s":1.0,"live_s":1.0}\n'
)
READ_LOGS = ["report", "replay", "trace", "advise"]
LOGS = {
    "too many workers": START.replace("3", "1000000000"),
    "no workers": START.replace("3", "0"),
    "negative workers": START.replace("3", "-3"),
    "a worker of a large number": START + '{"event":"worker_joined","now_s":1.0,"worker":1000000000}\n',
    "no start": END,
    "time goes back": START + UPDATE % (5.0, 1) + UPDATE % (3.0, 2),
    "an endless time": START.replace("0.0", "null"),
    "a version twice": START + UPDATE % (1.0, 1) + UPDATE % (2.0, 1),
    "a version left out": START + UPDATE % (1.0, 7),
    "a missing field": START + '{"event":"update_made","now_s":1.0}\n',
    "text for a number": START + UPDATE % ('"soon"', 1),
    "an unknown event": START + '{"event":"__class__"}\n',
    "an event that is a list": START + '{"event":["run_ended"]}\n',
    "an unknown outcome": START + END.replace("updates", "victory"),
    "metrics that are a list": START
    + '{"event":"version_evaluated","now_s":1.0,"version":0,"published_s":0.0,"metrics":[]}\n',
    "a number alone": START + "17\n",
    "work that ends before it began": START
    + '{"event":"work_interrupted","now_s":1.0,"worker":0,"draw":1,"version":0,"started_s":2.0,"samples":8}\n',
}


def refused_with_its_line(paceline, command, log):
    Path("run", EVENTS).write_text(LOGS[log])
    status, stderr, took_s = paceline(command, "run", *(["--overwrite"] if command == "trace" else []))
    assert_refused(status, stderr, took_s)
    assert f"{EVENTS}, line {LOGS[log].count(chr(10))} " in stderr


def test_invalid_logs_are_refused_with_the_line_number(paceline):
    for log, command in zip(LOGS, cycle(READ_LOGS)):
        refused_with_its_line(paceline, command, log)


@pytest.mark.slow
@pytest.mark.parametrize("command", READ_LOGS)
def test_every_command_refuses_invalid_logs(command, paceline):
    for log in LOGS:
        refused_with_its_line(paceline, command, log)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("workers", 10**9),
        ("workers", -1),
        ("batch_size", "8"),
        ("plan", "bsp"),
        ("plan", [{}]),
        ("plan", [17]),
        ("rules", []),
        ("rules", {}),
        ("stop", "updates"),
        ("stop", "x" * 300),
        ("protocol", 5),
    ],
)
def test_an_invalid_run_configuration_is_refused(key, value, paceline, tmp_path):
    path = tmp_path / "run" / RUN
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    assert_refused(*paceline("replay", "run"))


@pytest.mark.parametrize("knob", ["first", "then"])
def test_a_timing_file_that_names_itself_is_refused(knob, paceline, tmp_path):
    path = tmp_path / "timing.toml"
    path.write_text(path.read_text().replace(f'{knob} = "', f"{knob} = \"sync_switch(timing='timing.toml') + ", 1))
    status, stderr, took_s = paceline(*READERS["timing.toml"][0])
    assert_refused(status, stderr, took_s)
    assert "reads a timing file" in stderr


@pytest.mark.parametrize(
    "arguments",
    [
        (*TRAIN, "--protocol", "bsp", "--cluster", "1000000000*exp(mean=1) + 1*exp(mean=1)"),
        (*TRAIN, "--protocol", f"bsp(a={'[' * 5000}", "--cluster", "2*exp(mean=1)"),
        (*TRAIN, "--protocol", "x" * 300, "--cluster", "2*exp(mean=1)"),
        ("report", "x" * 300),
        ("replay", "x" * 300),
        ("trace", "x" * 300),
        ("advise", "x" * 300),
        ("train", "--resume", "x" * 300),
        (*TRAIN[:-1], "x" * 300, "--protocol", "bsp", "--cluster", "2*exp(mean=1)"),
        ("train", "x" * 300, "--protocol", "bsp", "--cluster", "2*exp(mean=1)", "--stop", "updates=1"),
        ("search-cost", "x" * 300),
        ("report", "run", "--out", "x" * 300),
    ],
    ids=lambda arguments: " ".join(arguments)[:60],
)
def test_absurd_arguments_are_refused_in_one_line(arguments, paceline):
    status, stderr, took_s = paceline(*arguments)
    assert_refused(status, stderr, took_s)


def test_a_report_does_not_search_a_whole_disk(paceline, tmp_path, monkeypatch):
    (tmp_path / "many/inner").mkdir(parents=True)
    for name in range(10):
        (tmp_path / "many/inner" / str(name)).touch()
    with monkeypatch.context() as patch:
        patch.setattr("paceline.recording.run_folder.MOST_ENTRIES", 9)
        status, stderr, took_s = paceline("report", "many")
    assert_refused(status, stderr, took_s)
    assert "name the folder of a run" in stderr
    assert_refused(*paceline("report", "/"))


def rewritten(checkpoint, change_state=lambda state: None, change_tensors=lambda tensors: None):
    """Change the content of a checkpoint and rewrite its checksums."""
    content = json.loads((checkpoint / STATE).read_bytes())
    tensors = safetensors.torch.load((checkpoint / TENSORS).read_bytes())
    change_state(content["state"])
    change_tensors(tensors)
    files = {STATE: json.dumps(content).encode(), TENSORS: safetensors.torch.save(tensors)}
    for name, data in files.items():
        (checkpoint / name).write_bytes(data)
    (checkpoint / SUMS).write_text("".join(f"{sha256(data).hexdigest()}  {name}\n" for name, data in files.items()))


def resume(run):
    """Resume a run for one more update; any error other than a `PacelineError` fails the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pl.train(tiny_job(), resume=run, measure_steps=True, **{**OPTIONS, "stop": "updates=31"})


def test_tensors_of_wrong_shape_with_valid_checksums_are_refused(made, tmp_path):
    names = safetensors.torch.load(max((made / "run" / CHECKPOINTS).glob(f"*/{TENSORS}")).read_bytes()).keys()
    for name in sorted(names):
        for change in (lambda tensor: tensor.reshape(-1)[:1], lambda tensor: torch.stack([tensor, tensor])):
            run = shutil.copytree(made / "run", tmp_path / "run", dirs_exist_ok=True)
            for checkpoint in (run / CHECKPOINTS).glob("*-update-*"):

                def apply(tensors, name=name, change=change):
                    if name in tensors:
                        tensors[name] = change(tensors[name])

                rewritten(checkpoint, change_tensors=apply)
            with pytest.raises(pl.RunError, match="holds what no run writes"):
                resume(run)
            shutil.rmtree(run)


@pytest.mark.parametrize("file", READERS)
@pytest.mark.parametrize("rounds", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_random_damage_never_causes_a_traceback(file, rounds, paceline, tmp_path):
    draw = random.Random(f"{file}{rounds}")
    whole = (tmp_path / file).read_bytes()
    for number in range(rounds):
        content = bytearray(whole)
        for _ in range(draw.choice([1, 1, 2, 5])):
            at = draw.randrange(len(content))
            match draw.randrange(4):
                case 0:
                    content[at] = draw.randrange(256)
                case 1:
                    del content[at : at + draw.randrange(1, 40)]
                case 2:
                    content[at:at] = draw.choice([b"9", b"-", b"e9", b"null", b'"', b"{", b"]", b"\n", b"\0", b"1e999"])
                case 3:
                    content[at:at] = content[at : at + draw.randrange(1, 200)]
        (tmp_path / file).write_bytes(content)
        command = READERS[file][number % len(READERS[file])]
        shutil.rmtree(tmp_path / "new", ignore_errors=True)
        status, stderr, _ = paceline(*command)
        assert "Traceback" not in stderr
        assert status == 0 or stderr.splitlines()[-1].startswith("paceline: "), stderr
        assert status in (0, 1, 2)


def test_every_command_that_reads_a_file_is_in_the_table():
    assert {command[0] for _, command in CASES} == {"report", "replay", "trace", "advise", "train", "search-cost"}
    assert Path(EVENTS).suffix == ".jsonl"


def test_an_endless_error_file_is_reported_as_unreadable(made, tmp_path):
    run = shutil.copytree(made / "run", tmp_path / "run")
    (run / ERROR).symlink_to("/dev/zero")
    stderr = SavedRun(run).error
    assert stderr is not None
    assert stderr.startswith("the error is unknown: cannot read ")
    assert stderr.endswith("(it is a device or a socket, expected a regular file)")
