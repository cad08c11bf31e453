"""Prediction of what shares by speed would give a recorded DDP run, and the command that gives it them."""

from __future__ import annotations

import shlex
from typing import Any, NamedTuple

import numpy as np

from paceline.clusters.simulated import Cluster
from paceline.clusters.timing.lease_time import LeaseTime
from paceline.clusters.timing.trace import Trace, TraceRow
from paceline.ddp_recording import layout
from paceline.ddp_recording.recording import DDPRecording, Seconds
from paceline.policies.controllers.balance import Balance
from paceline.policies.share_exchanges import ShareExchanges
from paceline.policies.shares import ShareBalancer
from paceline.recording.run_folder import plain
from paceline.run.simulate import simulate
from paceline.utils import files
from paceline.utils.wording import in_one_line, printable

DEFAULT = "balanced(m=8, leases=1)"
QUEUE = "balanced(m=8)"
BATCH_SIZE = 64  # where the recording has none
NOTABLE = 1.03
LEARNING = 20  # steps in which the policy learns the speeds, and whether slow ranks stay slow
MOST_STEPS = 2000  # simulated
LONGEST_COMMAND = 300
LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch")
MODULE = ("-m", "--module")
UNKNOWN = ["train.py"]


class SharesPrediction(NamedTuple):
    """Predicted time of DDP with shares by speed.

    Attributes:
        protocol: text of the protocol.
        seconds_per_update: predicted seconds per update, > 0.
        equal_s: recorded seconds per update of the same updates.
        command: command that gives the recorded script these shares, or the line of a loop that has a queue of them.
    """

    protocol: str
    seconds_per_update: float
    equal_s: float
    command: str

    @property
    def gain(self) -> float:
        """Time with equal shares over that with shares by speed."""
        return self.equal_s / self.seconds_per_update

    @property
    def sentence(self) -> str:
        """Prediction as a sentence, with the command."""
        if self.gain < NOTABLE:
            return f"Shares of the batch by speed would gain nothing ({self.gain:.2f} x): no rank is slow for long."
        return (
            f"With shares of the batch by speed an update would take {self.seconds_per_update:.3g} s in place of "
            f"{self.equal_s:.3g} ({self.gain:.2f} x), with the same parameters: {self.command}"
        )

    def compared_with(self, shares: SharesPrediction | None) -> str:
        """Return the prediction of a queue as a sentence, with what it adds to one share each.

        Args:
            shares: prediction of one share each; None if there is none.
        """
        took_s = f"Leases of an update from a queue would take {self.seconds_per_update:.3g} s"
        if shares is not None and shares.seconds_per_update < NOTABLE * self.seconds_per_update:
            return f"{took_s}, no less than one share each."
        return f"{took_s} ({self.gain:.2f} x), in a loop of your own: {self.command}"

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**plain(self._asdict()), "gain": self.gain}


def predict_shares(recording: DDPRecording, balance: Balance, protocol: str = DEFAULT) -> SharesPrediction:
    """Return the time with the shares that the policy would have decided in the recorded run.

    The own work of a rank is taken to be in proportion to its samples, and the rest of a step to stay, with what every
    rank spends outside forward and backward, as on the step of the optimizer. The first steps, in which the policy
    learns, are left out of a long enough recording.

    Args:
        recording: recording of two ranks or more.
        balance: settings of the shares.
        protocol: text of the protocol.
    """
    size = recording.headers[0].batch_size or BATCH_SIZE
    work_s = recording.work_s - recording.part_s("data").min(axis=0)
    shared_s, equal_s = simulated_steps(work_s, ShareBalancer(recording.ranks, balance.sizes(size)), size)
    rest_s = recording.step_s.mean(axis=0) - equal_s
    first = LEARNING if recording.steps >= 2 * LEARNING else 0
    update_s, before_s = (float((steps_s + rest_s)[first:].mean()) for steps_s in (shared_s, equal_s))
    return SharesPrediction(
        protocol=protocol, seconds_per_update=update_s, equal_s=before_s, command=run_command(recording)
    )


def predict_queue(recording: DDPRecording, protocol: str = QUEUE, seed: int = 0) -> SharesPrediction:
    """Return the time with leases from a queue, simulated with the recorded times.

    A lease costs what every rank spends outside forward and backward, as on its data and on the step of the optimizer.
    The sum and what else a step has beside the longest own work stay. The last 2,000 steps are simulated at most, and
    the first of them are left out as in `predict_shares`.

    Args:
        recording: recording of two ranks or more.
        protocol: text of the protocol.
        seed: seed of the simulation, >= 0.
    """
    work_s = recording.work_s[:, -MOST_STEPS:]
    steps = work_s.shape[1]
    lease_s = float(recording.part_s("data").min(axis=0).mean())
    cluster = Cluster(recording.ranks, _trace_of_work(work_s), leases=LeaseTime(cost_s=lease_s))
    first = LEARNING if steps >= 2 * LEARNING else 0
    first_s = simulate(protocol, cluster, updates=first, seed=seed).time_s if first else 0.0
    all_s = simulate(protocol, cluster, updates=steps, seed=seed).time_s
    balanced_s = (all_s - first_s) / (steps - first)
    steps_s = recording.step_s.mean(axis=0)[-MOST_STEPS:]
    rest_s = (steps_s - work_s.max(axis=0))[first:].mean()
    return SharesPrediction(
        protocol=protocol,
        seconds_per_update=float(balanced_s + rest_s),
        equal_s=float(steps_s[first:].mean()),
        command=f'pl.attach(model, optimizer, loader, protocol="{protocol}")',
    )


def _trace_of_work(work_s: Seconds) -> Trace:
    """Return a trace of the own work of ranks, as ranks x steps, without sums."""
    starts_s = np.cumsum(work_s, axis=1) - work_s
    return Trace(
        [
            TraceRow(
                worker=rank,
                draw=step + 1,
                start_s=start_s,
                pull_s=0.0,
                compute_s=own_s,
                push_s=0.0,
                end_s=start_s + own_s,
                censored=0,
            )
            for rank, rows in enumerate(np.stack([starts_s, work_s], axis=2).tolist())
            for step, (start_s, own_s) in enumerate(rows)
        ],
        source="a recording",
    )


def simulated_steps(work_s: Seconds, policy: ShareBalancer, size: int) -> tuple[Seconds, Seconds]:
    """Return the longest own work of each step, with the shares of a policy, and with equal ones.

    The ranks follow the policy as in a real run: they decide by the times of an exchange when the next step ends, and
    the first time of a rank with a new size does not count. A loader without processes is asked for a batch after the
    decision; one that holds batches follows later.

    Args:
        work_s: own work of each rank for a whole batch, in seconds, as ranks x steps.
        policy: policy of the shares.
        size: samples of a batch.
    """
    longest_s = np.empty(work_s.shape[1])
    exchanges = ShareExchanges(policy)
    known: list[set[int]] = [set() for _ in policy.shares]  # sizes that a rank has had
    for step, whole_s in enumerate(work_s.T):
        shares = policy.shares
        seconds = (whole_s * shares / size).tolist()
        longest_s[step] = max(seconds)
        counting = [s if share in sizes else 0.0 for s, share, sizes in zip(seconds, shares, known, strict=True)]
        exchanges.end_update(shares, counting)
        for share, sizes in zip(shares, known, strict=True):
            sizes.add(share)
    return longest_s, work_s.max(axis=0)


def run_command(recording: DDPRecording) -> str:
    """Return the command that gives the recorded script shares by speed."""
    hosts = len({header.host for header in recording.headers})
    several = f"--nnodes {hosts} --node-rank RANK --rdzv-endpoint HOST:29400 " if hosts > 1 else ""
    script = in_one_line(printable(shlex.join(_script(recording))), LONGEST_COMMAND)
    return f"paceline run {several}--nproc-per-node {recording.ranks // hosts} {script}"


def _script(recording: DDPRecording) -> list[str]:
    """Return the script in the recorded command, with its arguments."""
    for path in sorted(recording.path.glob(layout.HOSTS)):
        try:
            content = files.read_json(path)
        except (OSError, files.ContentError):
            continue
        command = content.get("command") if isinstance(content, dict) else None
        words = [str(word) for word in command] if isinstance(command, list) else []
        for place, (word, after) in enumerate(zip(words, [*words[1:], ""], strict=False)):
            if word.endswith(".py") or (word in MODULE and after not in LAUNCHERS):
                return words[place:]
    return UNKNOWN
