"""A run of 20,000 updates on real processes under a storm of 1,000 faults: no sample is lost or repeated.

Seven workers, and two more that join and leave, train with `asp`. Faults come with seeded updates: a worker is killed,
stopped, cut off, told to leave, joins or leaves. In the middle of each part rank 0 is killed, so that its standby goes
on; at its end the run is saved, and the next part resumes it.

python benchmarks/storm.py build/storm --parts 2     # the next two parts; all by default
python benchmarks/storm.py build/storm --check       # what came out, against runs without faults
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

import paceline as pl
from common import report, spread
from paceline.clusters.launch_env import SIDECAR
from paceline.core.records import RunResumed, UpdateMade, WorkerJoined, WorkerLost
from paceline.recording.log_tail import LogTail
from paceline.recording.run_folder import SavedRun
from storm_ranks import MORE, WORKERS, CountingNet, make_job, tensors_of

RANKS = Path(__file__).with_name("storm_ranks.py")
EPOCHS, MINIBATCHES = 114, 179  # of an epoch, which leaves out the last five samples
UPDATES = EPOCHS * MINIBATCHES
PARTS, FAULTS = 20, 50  # parts, and faults of each
KINDS = {"kill": 4, "notice": 3, "stop": 2, "cut": 2, "join": 2, "leave": 2}  # with their weights
BACK_S = (0.2, 2.0)  # until a process is started again
STOPPED_S = (1.0, 12.0)  # some of them longer than the timeout of a worker
HANG_S = 120.0  # without an update
SEEDS = 10  # of runs without faults


class Storm:
    """Processes of one part of the run, and the faults that come over them.

    Args:
        folder: folder of the run.
        part: number of the part, from 0.
    """

    def __init__(self, folder: Path, part: int) -> None:
        self._folder = folder
        self._random = random.Random(f"storm/{part}")
        self._kind = "resume" if (folder / "run.json").exists() else "out"
        self._environment = {
            "WORLD_SIZE": str(WORKERS + 1),
            "LOCAL_WORLD_SIZE": str(WORKERS + 1),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "PACELINE_TOKEN": f"storm-{os.getpid()}-{part}-a-token-that-is-hard-to-guess",
            "OMP_NUM_THREADS": "1",
        }
        self._log = (folder.parent / f"ranks-{part}.log").open("w")
        self._processes = {rank: self._start(rank) for rank in range(WORKERS + 1)}
        self._starts: dict[int, float] = {}  # when a rank is started again
        self._continues: dict[int, float] = {}  # when a stopped process goes on
        self.faults: Counter[str] = Counter()

    def strike(self, kind: str) -> None:
        """Let a fault happen to a process that is there; another one if there is none for it."""
        more = range(WORKERS + 1, WORKERS + 1 + MORE)
        absent = [rank for rank in more if rank not in self._starts and not self._runs(rank)]
        present = [rank for rank in more if self._runs(rank)]
        if kind == "join" and absent:
            self._starts[absent[0]] = time.monotonic()
        elif kind == "leave" and present:
            self._processes[present[0]].terminate()
        else:
            kind = kind if kind not in ("join", "leave") else "kill"
            self._strike_worker(kind)
        self.faults[kind] += 1

    def kill_rank_0(self) -> None:
        """Kill the process of rank 0."""
        self._processes[0].kill()
        self.faults["rank 0"] += 1

    def keep_up(self) -> None:
        """Start what is due to be started, continue what is due to go on, and start again what has ended."""
        now = time.monotonic()
        for rank, process in list(self._continues.items()):
            if process <= now:
                del self._continues[rank]
                self._processes[rank].send_signal(signal.SIGCONT)
        for rank in range(1, WORKERS + 1):
            if not self._runs(rank):
                self._starts.setdefault(rank, now + self._random.uniform(*BACK_S))
        for rank, due_s in list(self._starts.items()):
            if due_s <= now:
                del self._starts[rank]
                self._processes[rank] = self._start(rank)

    def save(self) -> None:
        """Ask the server to save the run and to end it, and wait until all processes have ended."""
        server = self._processes[0].pid if self._runs(0) else self._standby()
        for rank in self._continues:
            self._processes[rank].send_signal(signal.SIGCONT)
        os.kill(server, signal.SIGTERM)
        psutil.wait_procs([psutil.Process(server)], timeout=60)

    def close(self) -> None:
        """End all processes of this part."""
        for process in psutil.process_iter(["pid"]):
            with suppress(psutil.Error):
                if process.environ().get("PACELINE_TOKEN") == self._environment["PACELINE_TOKEN"]:
                    process.kill()
        self._log.close()

    def _strike_worker(self, kind: str) -> None:
        last = WORKERS - (kind == "notice")  # the standby would leave with the last rank
        ranks = [rank for rank in range(1, last + 1) if self._runs(rank) and rank not in self._continues]
        if not ranks:
            return
        rank = self._random.choice(ranks)
        process = self._processes[rank]
        match kind:
            case "kill":
                process.kill()
            case "notice":
                process.terminate()
            case "stop":
                process.send_signal(signal.SIGSTOP)
                self._continues[rank] = time.monotonic() + self._random.uniform(*STOPPED_S)
            case "cut":
                process.send_signal(signal.SIGUSR1)

    def _runs(self, rank: int) -> bool:
        return rank in self._processes and self._processes[rank].poll() is None

    def _standby(self) -> int:
        number = str(WORKERS + MORE + 1)
        for process in psutil.process_iter(["pid"]):
            with suppress(psutil.Error):
                given = process.environ()
                if (given.get(SIDECAR), given.get("PACELINE_TOKEN")) == (number, self._environment["PACELINE_TOKEN"]):
                    return int(process.pid)
        raise RuntimeError("neither rank 0 nor its standby is there")

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(RANKS), str(self._folder), str(EPOCHS), self._kind]
        environment = {**os.environ, **self._environment, "RANK": str(rank), "LOCAL_RANK": str(rank % (WORKERS + 1))}
        return subprocess.Popen(command, env=environment, stdout=self._log, stderr=self._log)


def run_part(build: Path, part: int) -> Counter[str] | None:
    """Run a part; return its faults, or None if the run was over before."""
    folder = build / "run"
    standby = build / "run-standby"
    if is_over(folder):
        return None
    begun = newest(folder)
    last = min(UPDATES, begun - (-UPDATES // PARTS))
    faults = sorted(random.Random(f"faults/{part}").sample(range(begun + 30, last - 30), FAULTS))
    kinds = random.Random(f"kinds/{part}").choices(list(KINDS), list(KINDS.values()), k=FAULTS)
    middle = faults[FAULTS // 2]
    storm = Storm(folder, part)
    try:
        followed, version = Followed(folder, begun), begun
        while version < last:
            version = followed.read()
            while faults and faults[0] <= version:
                if faults.pop(0) == middle:
                    storm.kill_rank_0()
                    followed = Followed(standby, version)
                else:
                    storm.strike(kinds.pop())
            storm.keep_up()
            time.sleep(0.05)
        if version < UPDATES:
            storm.save()
        else:
            time.sleep(5.0)  # the server evaluates and saves the model
    finally:
        storm.close()
    if standby.exists():
        shutil.rmtree(folder)
        standby.rename(folder)
    return storm.faults


class Followed:
    """Newest version in the log of a run.

    Args:
        folder: folder of the run.
        version: newest version so far.
    """

    def __init__(self, folder: Path, version: int = 0) -> None:
        self._tail = LogTail(folder / "events.jsonl")
        self._version = version
        self._changed_s = time.monotonic()

    def read(self) -> int:
        """Return the newest version.

        Raises:
            TimeoutError: there was no update for long.
        """
        for record in self._tail.read().records:
            if isinstance(record, UpdateMade):
                self._version, self._changed_s = max(self._version, record.version), time.monotonic()
        if time.monotonic() - self._changed_s > HANG_S:
            raise TimeoutError(f"no update after {self._version} for {HANG_S:g} s")
        return self._version


def is_over(folder: Path) -> bool:
    """Return whether the run has used all its data."""
    return newest(folder) >= UPDATES


def newest(folder: Path) -> int:
    """Return the number of updates in the log of a run."""
    if not (folder / "events.jsonl").exists():
        return 0
    return max((update.version for update in SavedRun(folder).history.of(UpdateMade)), default=0)


def check(build: Path) -> dict[str, Any]:
    """Return what the storm has left of the run, beside runs without faults."""
    history = SavedRun(build / "run").history
    state = load_file(build / "run" / "model.safetensors")
    updates = history.of(UpdateMade)
    steady = [simulated(seed) for seed in range(SEEDS)]
    losses, loss = [loss_of(each) for each in steady], loss_of(state)
    difference = float((state["count"] - steady[0]["count"]).abs().max())  # the storm has the first seed
    return {
        "faults": dict(sum((Counter(each) for each in json.loads((build / "faults.json").read_text())), Counter())),
        "updates": len(updates),
        "takeovers_and_resumptions": len(history.of(RunResumed)),
        "lost_workers": len(history.of(WorkerLost)),
        "joined_workers": len(history.of(WorkerJoined)),
        "largest_difference_in_the_times_that_a_sample_was_applied": difference,
        "longest_pause_s": max(after.now_s - before.now_s for before, after in pairwise(updates)),
        "loss": loss,
        "loss_without_faults": spread(losses),
        "meets_bar": difference == 0 and min(losses) <= loss <= max(losses),
    }


def simulated(seed: int) -> dict[str, torch.Tensor]:
    """Return the parameters of a run without faults, on simulated workers."""
    cluster = pl.Cluster(WORKERS, timing=pl.timing.ShiftedExponential(shift_s=0.2, mean_s=0.2))
    stop = pl.Stop(epochs=EPOCHS)
    return dict(pl.train(make_job(), protocol="asp", cluster=cluster, stop=stop, seed=seed).model.state_dict())


def loss_of(state: dict[str, torch.Tensor]) -> float:
    """Return the loss of the network on the test data."""
    model = CountingNet()
    model.load_state_dict(state)
    images, labels = tensors_of(pl.jobs.digits().eval_data)
    with torch.no_grad():
        return float(F.cross_entropy(model.net(images), labels))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def noted(build: Path) -> Iterator[list[dict[str, int]]]:
    """Yield the faults of each part so far; what is added is written down."""
    file = build / "faults.json"
    parts = json.loads(file.read_text()) if file.exists() else []
    yield parts
    file.write_text(json.dumps(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", type=Path, help="folder of the run and its progress")
    parser.add_argument("--parts", type=int, default=PARTS + 5, help="number of parts to run now")
    parser.add_argument("--check", action="store_true", help="only say what came out")
    parser.add_argument("--save", action="store_true", help="save the result in benchmarks/results/")
    args = parser.parse_args()
    args.build.mkdir(parents=True, exist_ok=True)
    for _ in range(0 if args.check else args.parts):
        with noted(args.build) as parts:
            faults = run_part(args.build.resolve(), len(parts))
            if faults is None:
                break
            parts.append(dict(faults))
        print(f"part {len(parts)}: {dict(faults)}, {newest(args.build / 'run')} updates", flush=True)
    if args.check or is_over(args.build / "run"):
        report("storm", args, check(args.build))


if __name__ == "__main__":
    main()
