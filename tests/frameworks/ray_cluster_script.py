"""Trainings of `pl.Ray` on this machine, as its driver: `ray_cluster_script.py NAME FOLDER`."""

import gc
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import lru_cache
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import ray
import torch
from ray._private import state as ray_state
from ray.cluster_utils import Cluster

import paceline as pl
from paceline.core.records import GradientArrived, UpdateMade, WorkerJoined, WorkerLost
from paceline.recording.run_folder import SavedRun
from paceline.run.ray_actors import ActorGroup
from tiny_counting import BATCH, counting_job

FOLDER = Path(sys.argv[2])
RUN = FOLDER / "run"
SEED = 1
SLOW = pl.Cluster(2, timing=pl.timing.ShiftedExponential(shift_s=0.1, mean_s=0.001))
DIGITS = pl.jobs.digits()
# Ray has no CPU for the actor of the fourth worker.
WAITING = {"workers": 3, "torchrun": {"slowness": replace(SLOW, n=4), "max_workers": 4}}
FIRST, MOST = 2, 4  # workers of a run that grows
EPOCHS, MINIBATCHES = 40, 100  # more than four slow workers compute within the time limit of the test
COUNTING = counting_job(MINIBATCHES * BATCH)


class Net(torch.nn.Module):
    """Model that only this script defines."""

    def __init__(self):
        super().__init__()
        if not torch.are_deterministic_algorithms_enabled():
            raise RuntimeError("the settings of the driver are missing")
        self.layer = torch.nn.Linear(64, class_count())

    def forward(self, inputs):
        return self.layer(inputs)


@lru_cache
def class_count():
    return 10


def own_loss(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets)


def failing_loss(outputs, targets):
    if os.environ["RANK"] == "2" and (FOLDER / "may fail").exists():
        raise ValueError("no such class")
    return own_loss(outputs, targets)


def slow_until_it_has_shrunk(model, batch):
    if not (FOLDER / "has shrunk").exists():
        time.sleep(0.25)
    return COUNTING.step(model, batch)


class LetFail(pl.callbacks.Callback):
    """Callback that lets the loss fail from an update on."""

    def on_update(self, update):
        if update.version == 5:
            (FOLDER / "may fail").touch()


class KillOnce(pl.callbacks.Callback):
    """Callback that kills the process of rank 0 at an update, once."""

    def on_update(self, update):
        if update.version == 20 and not (FOLDER / "killed").exists():
            (FOLDER / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def numbers(model):
    return [value for tensor in model.state_dict().values() for value in tensor.flatten().tolist()]


def facts(result):
    counts = result.history.totals.counts
    told = {"reason": result.reason, "stopped_by": result.stopped_by, "metrics": dict(result.metrics)}
    return {**told, "parameters": numbers(result.model), "updates": counts["updates"], "folder": str(result.folder)}


def train(job=DIGITS, protocol="bsp", workers=2, torchrun=None, stop="updates=20", max_restarts=-1, **settings):
    cluster = pl.Ray(workers, max_restarts=max_restarts, torchrun={"start_timeout_s": 60, **(torchrun or {})})
    return facts(pl.train(job, protocol=protocol, cluster=cluster, stop=stop, seed=SEED, **settings))


def train_own_job():
    """Train a job of this script, whose parts no actor can import."""
    torch.use_deterministic_algorithms(True)
    job = replace(DIGITS, model=Net, loss=own_loss)
    answer = train(job, out="run")
    expected = pl.train(job, protocol="bsp", cluster=pl.Cluster(2), stop="updates=20", seed=SEED)
    return {**answer, "expected": numbers(expected.model), "expected metrics": dict(expected.metrics)}


def train_slowly(**settings):
    settings = {"stop": "updates=200", "checkpoint_every": "updates=10", "out": "run", **settings}
    return train(**{"torchrun": {"slowness": SLOW}, **settings})


def kill_when_training(rank):
    """Kill the actor of a rank when the run has made 20 updates, and end the run when both workers compute again."""
    await_updates(20)
    ray.kill(actor_group()._actors[rank])
    end_when_both_compute()


def lose_host_when_training(rank):
    """Remove the host of a rank when the run has made 20 updates, and end the run when both workers compute again."""
    await_updates(20)
    address = actor_group()._supervisor._hosts[rank]
    (host,) = [each for each in hosts if each.node_ip_address == address]
    cluster.remove_node(host, allow_graceful=False)
    end_when_both_compute()


def end_when_both_compute():
    def have_both(records):
        joins_s = [each.now_s for each in records if isinstance(each, WorkerJoined) and each.now_s > 0]
        begin_s = min(joins_s, default=inf)
        return {0, 1} == {each.worker for each in records if isinstance(each, GradientArrived) and each.now_s > begin_s}

    await_records(have_both)
    os.kill(os.getpid(), signal.SIGINT)


def add_and_remove_host(late, training):
    """Add a host when the run has begun, remove it when its workers have contributed, and note that they are lost."""

    def has_begun(records):
        return any(isinstance(each, UpdateMade) for each in records)

    def have_contributed(records):
        used = Counter(each.worker for each in records if isinstance(each, GradientArrived) and each.used)
        return all(used[worker] >= 3 for worker in late)

    def are_lost(records):
        return late <= {each.worker for each in records if isinstance(each, WorkerLost) and each.now_s > 0}

    await_records(has_begun, training.done)
    host = cluster.add_node(num_cpus=len(late), node_ip_address="127.0.1.9")
    await_records(have_contributed, training.done)
    cluster.remove_node(host, allow_graceful=False)
    await_records(are_lost, training.done)
    (FOLDER / "has shrunk").touch()


def actor_group():
    (group,) = [each for each in gc.get_objects() if type(each) is ActorGroup]
    return group


def interrupt_when_training(updates=20):
    """Send Ctrl-C to this driver when the run has made some updates."""
    await_updates(updates)
    os.kill(os.getpid(), signal.SIGINT)


def await_updates(count):
    log = RUN / "events.jsonl"
    while not log.exists() or log.read_text().count('"update_made"') < count:
        time.sleep(0.05)


def await_records(hold, is_over=lambda: False):
    log = RUN / "events.jsonl"
    while not (is_over() or (log.exists() and hold(SavedRun(RUN).history.records))):
        time.sleep(0.05)


def in_background(function, *arguments):
    threading.Thread(target=function, args=arguments, daemon=True).start()


def kill_worker():
    in_background(kill_when_training, 2)
    return train_slowly(stop="updates=100000")


def lose_host():
    in_background(lose_host_when_training, 2)
    return train_slowly(stop="updates=100000")


def interrupt():
    in_background(interrupt_when_training)
    answer = {**train_slowly(stop="updates=100000", **WAITING), **what_is_left()}
    resumed = train(resume="run", stop=f"updates={answer['updates'] + 5}", **WAITING)
    return {**answer, "resumed": resumed}


def grow_and_shrink(protocol):
    """Train in another thread, because Ray adds hosts in the main thread only."""
    job = replace(COUNTING, step=slow_until_it_has_shrunk)
    settings = {"torchrun": {"max_workers": MOST}, "stop": f"epochs={EPOCHS}", "out": "run"}
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train, job, protocol, FIRST, **settings)
        add_and_remove_host({*range(FIRST, MOST)}, training)
        return {**training.result(), **what_is_left()}


def what_is_left():
    """Return the processes of actors and the states of the actors, when all have ended or after a while."""

    def found():
        return {"actors left": actors(), "states": sorted({each["State"] for each in ray_state.actors().values()})}

    deadline_s = time.monotonic() + 10
    while (left := found()) != {"actors left": [], "states": ["DEAD"]} and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return left


def actors():
    """Return the titles of the processes of this driver's Ray that are actors of paceline."""
    titles = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            titles.append(" ".join(process.cmdline()))
    return [title for title in titles if title.startswith("ray::") and "RankActor" in title]


def errors():
    """Return what is raised in the driver, for each thing that goes wrong."""
    cases = {
        "code": lambda: train_slowly(job=replace(DIGITS, loss=failing_loss), callbacks=[LetFail()]),
        "usage": lambda: train(out="run"),
        "no restart": lambda: train(callbacks=[KillOnce()], stop="updates=50", max_restarts=0),
        "pickle": lambda: train(replace(DIGITS, loss=lambda *given: threading.Lock() and LOCK)),
        "resources": lambda: train(workers=9, torchrun={"start_timeout_s": 3}),
    }
    raised = {}
    for name, case in cases.items():
        try:
            case()
        except pl.PacelineError as error:
            raised[name] = [type(error).__name__, str(error), str(error.__cause__)]
    return raised


LOCK = threading.Lock()
CASES = {
    "bsp": train,
    "own job": train_own_job,
    "all_reduce": lambda: train(protocol="all_reduce", workers=3),
    "kill worker": kill_worker,
    "lose host": lose_host,
    "kill server": lambda: train_slowly(callbacks=[KillOnce()], **WAITING),
    "interrupt": interrupt,
    "stay small": lambda: {**train(out="run", **WAITING), **what_is_left()},
    "grow bsp": lambda: grow_and_shrink("bsp"),
    "grow all_reduce": lambda: grow_and_shrink("all_reduce"),
    "errors": errors,
}

CPUS_OF_HOSTS = {"lose host": [1, 1, 1, 1], "grow bsp": [FIRST + 1], "grow all_reduce": [FIRST]}

if __name__ == "__main__":
    os.chdir(FOLDER)
    (FOLDER / "code").mkdir()
    elsewhere = {"working_dir": "code"}  # the working directory of the actors is a copy of this folder
    with ExitStack() as started:
        if sys.argv[1] in CPUS_OF_HOSTS:  # hosts are addresses of this one, and a head without actors
            # Ray notes the cluster there, and other drivers would find it.
            os.environ["RAY_TMPDIR"] = started.enter_context(TemporaryDirectory(prefix="ray"))
            cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
            started.callback(cluster.shutdown)
            hosts = [
                cluster.add_node(num_cpus=cpus, node_ip_address=f"127.0.1.{number}")
                for number, cpus in enumerate(CPUS_OF_HOSTS[sys.argv[1]], 1)
            ]
            ray.init(cluster.address, runtime_env=elsewhere)
        else:
            ray.init(num_cpus=4, include_dashboard=False, runtime_env=elsewhere)
        started.callback(ray.shutdown)
        answer = CASES[sys.argv[1]]()
        (FOLDER / "answer.json").write_text(json.dumps(answer))
