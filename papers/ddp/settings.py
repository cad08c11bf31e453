"""Jobs, contenders and comparisons, written down before they were run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import paceline as pl
from papers.ddp.patterns import PATTERNS

RESULTS = Path(__file__).parent / "results"
SEEDS = 5
TUNING_SEEDS = (100, 101, 102, 103)  # of the search for DDP's rate, at most; no comparison uses them
EVALUATIONS = 40  # of a run
MARGIN = 0.02  # nats above DDP's final validation loss: the target

# Measured on this project's machine, see benchmarks/results: transport_round_trip, transport_processor, server_time.
LINES = pl.timing.Network(
    latency_s=1.6e-4, up_bytes_per_s=0.75e9, down_bytes_per_s=0.75e9
)  # TLS between server and worker
SUMS = pl.timing.Network(latency_s=2.7e-4, up_bytes_per_s=1.65e9, down_bytes_per_s=1.65e9)  # gloo, not encrypted
LEASE_S = 7e-3  # of each lease whatever its samples: 7 % of a minibatch of the GPT, 10 % of one of the CNN, on one core
TORCHFT_STEP_S = 1.9e-3  # more than a step of DDP; see torchft_step in benchmarks/results
GRADIENT_S_PER_BYTE, UPDATE_S_PER_BYTE = 7.2e-11, 1.34e-10  # of the server's processor


@dataclass(frozen=True)
class JobSettings:
    """Job of the comparison.

    Args:
        title: name in tables.
        gradients: minibatches of a run, the same for every contender, by the number of workers.
        batch_size: samples of a minibatch.
        rates: learning rates of DDP that are tried.
        lr: the best of them, the rate of every contender, by the number of workers.
        optimizer: "sgd", "momentum" for SGD with momentum 0.9 and weight decay 1e-4, or "adamw".
        cosine: whether the rate falls by a cosine over the run.
        payload_bytes: bytes of the trained parameters.
        tunings: number of seeds of the search for DDP's rate.
    """

    title: str
    gradients: Mapping[int, int]
    batch_size: int
    rates: Sequence[float]
    lr: Mapping[int, float]
    optimizer: Literal["sgd", "momentum", "adamw"]
    cosine: bool
    payload_bytes: int
    tunings: int = len(TUNING_SEEDS)


JOBS: Mapping[str, JobSettings] = {
    "mnist": JobSettings(
        title="MNIST CNN",
        gradients={8: 1_920, 32: 3_840},
        batch_size=64,
        rates=(0.02, 0.04, 0.08, 0.16, 0.32, 0.64),
        lr={8: 0.16, 32: 0.08},
        optimizer="sgd",
        cosine=False,
        payload_bytes=87_360,
    ),
    "gpt": JobSettings(
        title="char-GPT, 1 M parameters",
        gradients={8: 1_600},
        batch_size=8,
        rates=(5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
        lr={8: 2e-3},
        optimizer="adamw",
        cosine=True,
        payload_bytes=4_168_348,
    ),
    "resnet20": JobSettings(
        title="ResNet-20 on CIFAR-10",
        gradients={8: 1_600},
        batch_size=64,
        rates=(0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6),  # those below 0.1 were added when 0.1 was the best of the others
        lr={8: 0.1},
        optimizer="momentum",
        cosine=True,
        payload_bytes=1_078_888,
        tunings=2,
    ),
    "smollm2": JobSettings(
        title="SmolLM2-135M with LoRA",
        gradients={8: 320},
        batch_size=1,
        rates=(5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),  # 8e-3 and 1.6e-2 were added when the largest was the best
        lr={8: 8e-3},
        optimizer="adamw",
        cosine=True,
        payload_bytes=1_843_200,
        tunings=2,
    ),
    # Only for trials, which need no data folder.
    "digits": JobSettings(
        title="digits",
        gradients={8: 960},
        batch_size=16,
        rates=(0.25, 0.5, 1.0, 2.0, 4.0),
        lr={8: 1.0},
        optimizer="sgd",
        cosine=False,
        payload_bytes=19_240,
    ),
}

Kind = Literal["torch", "lockstep", "timed"]


@dataclass(frozen=True)
class Contender:
    """Way to train.

    Args:
        kind: "torch" for a peer, whose parameters do not depend on times and which restarts when a worker dies;
            "lockstep" for a protocol of paceline whose parameters do not depend on times unless a worker dies; "timed"
            for every other one.
        protocol: protocol of paceline that makes the same updates; {n} is the number of workers, {rest} one less.
        rule: learning-rate rule.
        without_slow: whether the slow worker is removed.
        averages_after: share of the workload after which the local steps of `protocol` begin, after all_reduce.
        more_s: seconds of an update on top of the sum.
        updates_of: contender whose updates it makes, so that it is trained only where a worker dies; empty for none.
    """

    kind: Kind
    protocol: str
    rule: Literal["constant", "proportional", "noise"] = "constant"
    without_slow: bool = False
    averages_after: float = 0.0
    more_s: float = 0.0
    updates_of: str = ""

    @property
    def has_server(self) -> bool:
        """Whether a parameter server makes the updates."""
        return not self.protocol.startswith(("all_reduce", "local_sgd", "dc_s3gd", "balanced"))

    @property
    def has_queue(self) -> bool:
        """Whether workers take leases of an update from a queue."""
        return self.protocol.startswith("balanced") and "leases=1" not in self.protocol

    def trained_as(self, name: str, dies: bool) -> str:
        """Return the name of the contender whose runs have its parameters; its own name is given."""
        return self.updates_of if self.updates_of and not self.is_timed(dies) else name

    def is_timed(self, dies: bool) -> bool:
        """Return whether its parameters depend on times, where a worker dies or not."""
        return self.kind == "timed" or (self.kind == "lockstep" and dies)

    def plan(self, n: int) -> str:
        """Return the protocol of n workers."""
        return self.protocol.format(n=n, rest=n - 1)


DDP, WITHOUT_SLOW, AUTO = "DDP", "DDP without the slow worker", "auto"
BALANCED, QUEUE = "balanced", "balanced, queue"

CONTENDERS: Mapping[str, Contender] = {
    DDP: Contender("torch", "all_reduce"),
    WITHOUT_SLOW: Contender("torch", "all_reduce", without_slow=True),
    "local SGD (H=4)": Contender("torch", "local_sgd(H=4)"),
    "post-local SGD (H=4)": Contender("torch", "local_sgd(H=4)", averages_after=0.5),
    # Without a failure, the updates of DDP; when a worker dies, the others go on, as under the elastic all_reduce.
    "torchft": Contender("lockstep", "all_reduce", more_s=TORCHFT_STEP_S),
    # DDP's own sums, as under `paceline run`; a worker that dies is missed by none of the others.
    BALANCED: Contender("lockstep", "balanced(m=8, leases=1)", updates_of=DDP),
    # One sum of all ranks in an update, without a server.
    QUEUE: Contender("lockstep", "balanced(m=8)", updates_of=DDP),
    "bsp": Contender("lockstep", "bsp"),
    "k_sync(k=n-1)": Contender("timed", "k_sync(k={rest})"),
    "k_sync(k=n-1), noise": Contender("timed", "k_sync(k={rest})", "noise"),
    "k_batch_async(k=n)": Contender("timed", "k_batch_async(k={n})"),
    "k_batch_async(k=n), noise": Contender("timed", "k_batch_async(k={n})", "noise"),
    "dbw": Contender("timed", "dbw"),
    "sync_switch": Contender("timed", "sync_switch(fraction=0.25)", "proportional"),
    "dc_s3gd": Contender("lockstep", "dc_s3gd"),
    AUTO: Contender("timed", "auto", "noise"),
}


class Comparison(NamedTuple):
    """Part of the grid: some contenders on a job, a number of workers and a pattern, with several seeds."""

    job: str
    n: int
    pattern: str
    contenders: Sequence[str]
    seeds: int


EIGHT = (DDP, WITHOUT_SLOW, BALANCED, QUEUE, "local SGD (H=4)", "k_sync(k=n-1)", "k_batch_async(k=n), noise", AUTO)
SIX = (DDP, WITHOUT_SLOW, BALANCED, QUEUE, "k_sync(k=n-1)", AUTO)
FIVE = (DDP, WITHOUT_SLOW, BALANCED, "k_sync(k=n-1)", AUTO)  # for batch normalization, which sees leases
TRIED = (DDP, WITHOUT_SLOW, BALANCED, QUEUE, "k_sync(k=n-1)", "k_batch_async(k=n), noise", AUTO)
TRIAL_SEEDS = 3
SHOWN = ("mnist", 8)  # job and workers of the figures and of the README

GRID: Sequence[Comparison] = (
    *(Comparison("mnist", 8, pattern, tuple(CONTENDERS), SEEDS) for pattern in PATTERNS),
    *(Comparison("gpt", 8, pattern, EIGHT, SEEDS) for pattern in ("quarter", "rotating", "transient")),
    *(Comparison("mnist", 32, pattern, SIX, SEEDS) for pattern in PATTERNS),
    Comparison("resnet20", 8, "transient", FIVE, 3),
    Comparison("smollm2", 8, "transient", SIX, 3),
)
