"""Train a small language model over two sites of two workers; only the link between the sites is slow.

    python examples/two_sites.py           # simulated, about a minute
    python examples/two_sites.py --real    # real processes in network namespaces, about three minutes; needs root

The server is at the site of workers 0 and 1. In the simulation these two reach it in no time. Workers 2 and 3 share the
link: each has half of its rate, and its whole latency. Without a server the sum is a ring, whose every step takes as
long as its connection between the sites.
"""

import argparse
import json
import os
import pydoc_data.topics
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.clusters.simulated import RoundTrip, RoundTrips
from paceline.core.records import GradientArrived, VersionEvaluated, WorkInterrupted, WorkUnfinished

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from namespaces import Hosts, hosts, why_there_are_none

WORKERS, FAR = 4, (2, 3)  # the workers that are not at the server's site
MBIT_PER_S, LATENCY_S = 100, 0.025  # of the link between the sites, in each direction
GRADIENT_S = pl.timing.Gamma(16, 0.1)  # seconds of one gradient
MARGIN = 0.03
H, OUTER = 16, "nesterov(lr=0.7, momentum=0.5)"
PROTOCOLS = {
    "bsp": "bsp",
    "local_sgd": f"local_sgd(H={H}, outer='{OUTER}')",
    "k_sync(k=3) + local_steps": f"k_sync(k=3) + local_steps(H={H}, outer='{OUTER}')",
}
CONTEXT, WIDTH, HEADS, LAYERS = 64, 96, 4, 2


# --- the job ---------------------------------------------------------------------------------------------------------


class GPT(nn.Module):
    """Character-level GPT."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = partial(nn.TransformerEncoderLayer, WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu")
        self.layers = nn.ModuleList(layer(batch_first=True, norm_first=True) for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.characters(text) + self.places.weight
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        logits: Tensor = self.head(x)
        return logits


def next_character(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    text, following = batch
    return F.cross_entropy(model(text).flatten(0, 1), following.flatten())


def make_job() -> pl.Job:
    """Return the job: predict the next character of Python's own documentation."""
    text = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    crops = torch.tensor([numbers[character] for character in text]).unfold(0, CONTEXT + 1, CONTEXT // 2)
    held_out = len(crops) // 10
    training, validation = crops[:-held_out], crops[-held_out::8]
    return pl.Job(
        name="two sites",
        model=partial(GPT, len(numbers)),
        optimizer=partial(torch.optim.AdamW, lr=2e-3),
        data=TensorDataset(training[:, :-1], training[:, 1:]),
        batch_size=8,
        step=next_character,
        eval_data=TensorDataset(validation[:, :-1], validation[:, 1:]),
    )


def train(protocol: str, cluster: pl.Cluster | pl.Torchrun, seconds: float) -> pl.results.Result:
    job, stop = make_job(), pl.Stop(seconds=seconds)
    return pl.train(job, protocol=protocol, cluster=cluster, stop=stop, evaluate_every="gradients=64", seed=0)


class Run(NamedTuple):
    """Validation losses of a run, each with its second, and the bytes that crossed the link between the sites."""

    losses: Sequence[tuple[float, float]]
    link_bytes: float


def losses_of(result: pl.results.Result) -> list[tuple[float, float]]:
    return [(each.published_s, each.metrics["loss"]) for each in result.history.of(VersionEvaluated)]


# --- two simulated sites ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TwoSites(pl.Cluster):
    """Simulated cluster whose workers at the server's site send and receive in no time."""

    def round_trips(self, seed: int, payload_bytes: float = 0) -> RoundTrips:
        return TwoSitesTrips(self, seed, payload_bytes)


class TwoSitesTrips(RoundTrips):
    """Round trips of `TwoSites`."""

    def times(self, worker: int, draw: int, start_s: float, share: float = 1.0) -> RoundTrip:
        trip = super().times(worker, draw, start_s, share)
        return trip if worker in FAR else trip._replace(pull_s=0.0, push_s=0.0)

    def duration_s(self, worker: int, draw: int, start_s: float, share: float = 1.0) -> float:
        return self.times(worker, draw, start_s, share).total_s


def simulated(protocol: str, seconds: float) -> Run:
    """Train on the simulated sites."""
    has_server = "local_sgd" not in protocol
    bytes_per_s = MBIT_PER_S * 1e6 / 8 / (len(FAR) if has_server else 1)
    network = pl.timing.Network(latency_s=LATENCY_S, up_bytes_per_s=bytes_per_s, down_bytes_per_s=bytes_per_s)
    result = train(protocol, TwoSites(WORKERS, GRADIENT_S, network=network), seconds)
    payload_bytes = 4 * sum(each.numel() for each in result.model.parameters())
    return Run(losses_of(result), payload_bytes * (messages(result) if has_server else ring_messages(result)))


def messages(result: pl.results.Result) -> float:
    """Return the number of versions and gradients that were sent from one site to the other."""
    history = result.history
    arrived = {(each.worker, each.draw) for each in history.of(GradientArrived)}
    stopped = {(each.worker, each.draw) for kind in (WorkInterrupted, WorkUnfinished) for each in history.of(kind)}
    return sum(worker in FAR for worker, _ in [*arrived, *(arrived | stopped)])


def ring_messages(result: pl.results.Result) -> float:
    """Return the payloads that the ring has sent over its two connections between the sites."""
    sums = result.history.totals.updates // H
    return sums * 2 * 2 * (WORKERS - 1) / WORKERS


# --- two sites of real processes -------------------------------------------------------------------------------------


def real(protocol: str, seconds: float) -> Run:
    """Train on four hosts, which are network namespaces, with one process for each worker."""
    with hosts(2, 2) as made:
        made.join_sites(f"{MBIT_PER_S}mbit", LATENCY_S)
        token = secrets.token_hex()
        ranks = [start_rank(made, rank, protocol, seconds, token) for rank in range(WORKERS)]
        try:
            said = [rank.communicate()[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(rank.returncode for rank in ranks):
            sys.exit(f"A rank of {protocol} failed; its error is above.")
        return Run(json.loads(said[0]), made.bytes_between_sites())


def start_rank(made: Hosts, rank: int, protocol: str, seconds: float, token: str) -> subprocess.Popen[str]:
    """Start this script on a host as one rank, with the variables that torchrun would set."""
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(WORKERS),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": made.address(0),
        "MASTER_PORT": "29500",
        "PACELINE_TOKEN": token,
    }
    command = [sys.executable, __file__, "--rank-of", protocol, "--seconds", str(seconds)]
    return made.run(made.names[rank], command, env={**os.environ, **variables})


def train_as_rank(protocol: str, seconds: float) -> None:
    """Train in this process, which sleeps for the seconds of a gradient; rank 0 prints the losses."""
    slowness = pl.Cluster(WORKERS, GRADIENT_S)
    address = os.environ["MASTER_ADDR"]
    cluster = pl.Torchrun(address=address, worker_at_server=True, slowness=slowness, threads=1)
    result = train(protocol, cluster, seconds)
    if cluster.is_server:
        print(json.dumps(losses_of(result)))


# --- the comparison --------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true", help="train on real processes in network namespaces")
    parser.add_argument("--seconds", type=float, default=45.0, help="seconds of each training (default 45)")
    parser.add_argument("--rank-of", metavar="PROTOCOL", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if args.rank_of:
        train_as_rank(args.rank_of, args.seconds)
        return
    if args.real and (reason := why_there_are_none()):
        sys.exit(f"--real needs Linux, root, and ip and tc (iproute2): {reason}. Omit it to simulate the sites.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # removes the namespaces
    runs = {name: (real if args.real else simulated)(each, args.seconds) for name, each in PROTOCOLS.items()}
    console = Console(highlight=False)
    console.print(table(runs))
    seconds = f"{args.seconds:g} {'' if args.real else 'simulated '}seconds"
    console.print(f"Each protocol trained for {seconds}, with H={H} and outer={OUTER}.")


def table(runs: dict[str, Run]) -> Table:
    """Return seconds to the last loss of BSP plus a margin, last loss and bytes of each run."""
    target = runs["bsp"].losses[-1][1] + MARGIN
    made = Table(title=f"Two sites, {MBIT_PER_S} Mbit/s and {LATENCY_S * 1000:.0f} ms each way between them")
    made.add_column("protocol", no_wrap=True)
    for column in (f"loss {target:.2f} after", "last loss", "between the sites"):
        made.add_column(column, justify="right")
    for name, run in runs.items():
        reached = [f"{at_s:.1f} s" for at_s, loss in run.losses if loss <= target]
        made.add_row(name, [*reached, "-"][0], f"{run.losses[-1][1]:.2f}", f"{run.link_bytes / 1e6:.0f} MB")
    return made


if __name__ == "__main__":
    main()
