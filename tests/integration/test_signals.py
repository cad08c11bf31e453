"""Signals and the end of a run: no process and no model is left, and the run folder is readable."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from multiprocessing import parent_process

import psutil
import pytest
from jupyter_client.manager import run_kernel
from torch import nn

import paceline as pl
from event_lines import read_events
from machine_speed import scaled
from paceline.engines.signals import holding_sigterm, is_sigterm_held
from paceline.recording.run_folder import EVENTS
from ranks import context, free_port, run
from selections import parametrize_few
from tiny_jobs import small_net, tiny_job


class Announce(pl.callbacks.Callback):
    """Callback that sends a message after some updates."""

    def __init__(self, connection):
        self._connection = connection

    def on_update(self, update):
        if update.version == 5:
            self._connection.send("training")


def train_in(folder, connection):
    """Train as a script does that was started by a shell: in a session of its own."""
    os.setsid()
    os.chdir(folder)
    slow = pl.Cluster(2, timing=pl.timing.Deterministic(0.01))
    cluster = pl.LocalCluster(2, slowness=slow)
    pl.train(
        tiny_job(), protocol="asp", cluster=cluster, stop="updates=1000000", out="run", callbacks=[Announce(connection)]
    )


LIMIT_S = scaled(60)


@pytest.fixture
def running(tmp_path):
    """A process that trains, the processes that it has started, and its log."""
    ours, theirs = context().Pipe(duplex=False)
    process = context().Process(target=train_in, args=(tmp_path, theirs))
    process.start()
    theirs.close()
    assert ours.poll(LIMIT_S)
    assert ours.recv() == "training"
    descendants = psutil.Process(process.pid).children(recursive=True)
    assert len(descendants) >= 3  # two workers and the process that forks them
    yield process, descendants, tmp_path / "run" / EVENTS
    process.kill()
    process.join()


def assert_gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=LIMIT_S)
    assert alive == []


@pytest.mark.processes
def test_kill_9_of_the_parent_leaves_no_process(running):
    process, descendants, log = running
    process.kill()
    process.join()
    assert_gone(descendants)
    events = read_events(log)
    assert events[0]["event"] == "run_started"
    assert events[-1]["event"] != "run_ended"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_and_saves_the_model(running, number):
    process, descendants, log = running
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # a terminal sends Ctrl-C to every process
    else:
        os.kill(process.pid, number)
    process.join(LIMIT_S)
    assert process.exitcode == 0
    assert_gone(descendants)
    end = read_events(log)[-1]
    assert (end["event"], end["outcome"]) == ("run_ended", "interrupted")
    assert (log.parent / "model.safetensors").exists()
    assert json.loads((log.parent / "run.json").read_text())["seed"] == 0


class Terminating(nn.Module):
    """A model whose first copy sends SIGTERM to this process."""

    is_sent = False

    def __init__(self):
        super().__init__()
        self.net = small_net()

    def __deepcopy__(self, memo):
        if parent_process() is None and not Terminating.is_sent:
            Terminating.is_sent = True
            os.kill(os.getpid(), signal.SIGTERM)
        copied = Terminating()
        copied.load_state_dict(self.state_dict())
        return copied

    def forward(self, inputs):
        return self.net(inputs)


@parametrize_few("cluster", ["2*exp(mean=1)", "local:2"], keep=1)
def test_sigterm_before_the_first_update_ends_a_saved_run(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(Terminating, "is_sent", False)
    before = signal.getsignal(signal.SIGTERM)
    job = tiny_job(model=Terminating())
    result = pl.train(job, protocol="asp", cluster=cluster, stop="updates=5", out=tmp_path / "run")
    assert (result.stopped_by, result.reason) == ("interrupted", "interrupted by SIGTERM")
    assert signal.getsignal(signal.SIGTERM) == before
    resumed = pl.train(job, protocol="asp", cluster=cluster, stop="updates=5", resume=tmp_path / "run")
    assert (resumed.stopped_by, resumed.history.totals.updates) == ("updates", 5)


def test_held_sigterm_is_delivered_when_no_engine_handles_it():
    caught = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: caught.append(number))
    try:
        with holding_sigterm(), holding_sigterm():
            os.kill(os.getpid(), signal.SIGTERM)
            assert is_sigterm_held()
            assert caught == []
        assert caught == [signal.SIGTERM]
        with holding_sigterm():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)  # the second one acts at once
            assert len(caught) == 2
    finally:
        signal.signal(signal.SIGTERM, before)


WHILE_TORCH_IS_IMPORTED = """
import os, signal, sys

class SendsSigterm:
    def find_spec(self, name, *_):
        if name == "torch.nn":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, SendsSigterm())
from paceline.cli import main
assert "torch" not in sys.modules
sys.argv = ["paceline", "train", "digits", "--protocol", "asp", "--cluster", sys.argv[1], "--stop", "updates=1000000",
            "--out", "run"]
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["2*exp(mean=1)", "local:2", "torchrun"])
def test_sigterm_during_the_import_of_torch_ends_the_run_with_status_130(cluster, tmp_path):
    (tmp_path / "command.py").write_text(WHILE_TORCH_IS_IMPORTED)
    rank_0 = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PACELINE_TOKEN": "secret",
    }
    done = subprocess.run(
        [sys.executable, "command.py", cluster],
        cwd=tmp_path,
        env={**os.environ, **(rank_0 if cluster == "torchrun" else {})},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr.endswith("to resume: paceline train --resume run\n")
    end = read_events(tmp_path / "run" / EVENTS)[-1]
    assert (end["event"], end["reason"]) == ("run_ended", "interrupted by SIGTERM")


IN_A_NOTEBOOK = """
import torch, paceline as pl
from torch import nn
from torch.utils.data import TensorDataset

class Announce(pl.callbacks.Callback):
    def on_update(self, update):
        if update.version == 5:
            print("training", flush=True)

def model():
    return nn.Linear(2, 1)

job = pl.Job(model=model, loss=nn.MSELoss(), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
             data=TensorDataset(torch.ones(40, 2), torch.ones(40, 1)), batch_size=4)
result = pl.train(job, protocol="asp", cluster=pl.LocalCluster(2), stop="updates=1000000", callbacks=[Announce()])
print(result.stopped_by, result.reason, "with", sum(p.numel() for p in result.model.parameters()), "parameters")
"""


@pytest.mark.slow
def test_an_interrupted_notebook_keeps_the_trained_model():
    with run_kernel(kernel_name="python3") as client:
        printed = []

        def on_output(message):
            content = message["content"]
            printed.append(content.get("text", "") + "".join(content.get("traceback", ())))
            if "training" in printed[-1]:
                client.parent.interrupt_kernel()

        reply = client.execute_interactive(IN_A_NOTEBOOK, output_hook=on_output, timeout=LIMIT_S)
        assert reply["content"]["status"] == "ok", printed
        assert "interrupted interrupted by Ctrl-C with 3 parameters" in "".join(printed)
        reply = client.execute_interactive("1 + 1", output_hook=on_output, timeout=LIMIT_S)
        assert reply["content"]["status"] == "ok"


@pytest.fixture
def recorded_job():
    """Return a job, and weak references to every model that is made for it."""
    made = []

    def model():
        built = small_net()
        made.append(weakref.ref(built))
        return built

    return tiny_job(model=model, microbatches=2), made


def left_of(made, expected):
    """Return the models still in memory, after 5 s at most: another thread may delay a collection."""
    deadline_s = time.monotonic() + scaled(5)
    while True:
        gc.collect()
        left = [model() for model in made if model() is not None]
        if len(left) == expected or time.monotonic() > deadline_s:
            return left


@parametrize_few("protocol", ["asp", "all_reduce", "dc_s3gd"], keep=1)
def test_a_run_leaves_no_model_in_memory(recorded_job, protocol):
    job, made = recorded_job
    result = pl.train(job, protocol=protocol, cluster="2*exp(mean=1)", stop="updates=3")
    assert left_of(made, expected=1) == [result.model]


def test_a_rank_without_a_server_leaves_no_model_in_memory(recorded_job):
    job, made = recorded_job
    run(1, job, protocol="dc_s3gd", stop="updates=3")
    assert left_of(made, expected=0) == []
