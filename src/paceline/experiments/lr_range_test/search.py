"""`knee`: the learning rate for each quorum k, read from runs in which the rate rises with every update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from numbers import Integral

import torch
from torch.optim.lr_scheduler import LambdaLR

from paceline.catalogue.protocols import CATALOGUE
from paceline.clusters.local import LocalCluster
from paceline.clusters.parser import parse_cluster
from paceline.clusters.simulated import Cluster
from paceline.clusters.torchrun import without_torchrun
from paceline.core.events import Outcome
from paceline.core.stop import Stop
from paceline.errors import PacelineError, RunError, UsageError, did_you_mean
from paceline.experiments.lr_range_test.curve import Range, averaged, find_knee, smoothed
from paceline.jobs.job import Job
from paceline.processes.shared_pickle import refuse_while_unpickling
from paceline.protocols.protocol import Protocol, as_plan
from paceline.recording.callback import Callback
from paceline.run.train import AnyCluster, train
from paceline.utils.argument_types import checked_types
from paceline.utils.representation import Representation, TableRepresentation
from paceline.utils.spec_parser import parse_call
from paceline.utils.text_table import TextTable
from paceline.utils.validation import check_range

Watch = Callable[[str, Stop], AbstractContextManager[Callback]]


@dataclass(frozen=True, repr=False)
class Knee(Representation):
    """The learning rate for one quorum, and the curve that it was read from.

    Attributes:
        k: gradients an update.
        learning_rate: the knee.
        is_bound: whether the loss has not risen up to the highest rate, so that the knee may lie higher.
        rates: that were tried, in this order.
        losses: after the update at each rate, the mean of the runs, smoothed.
    """

    k: int
    learning_rate: float
    is_bound: bool
    rates: tuple[float, ...]
    losses: tuple[float, ...]

    def _facts(self) -> Mapping[str, object]:
        return {"k": self.k, "learning_rate": self.learning_rate, "is_bound": self.is_bound, "rates": len(self.rates)}

    @property
    def loss(self) -> float:
        """The smoothed loss after the update at the knee's rate."""
        return self.losses[self.rates.index(self.learning_rate)]


@dataclass(frozen=True, repr=False)
class Knees(TableRepresentation):
    """The learning rates for each quorum that was asked for.

    Attributes:
        job: its name.
        protocol: its name, without k.
        cluster: in words.
        seeds: of the runs for each k.
        knees: in the order of the k's that were asked for.
    """

    job: str
    protocol: str
    cluster: str
    seeds: tuple[int, ...]
    knees: tuple[Knee, ...]

    @property
    def learning_rates(self) -> dict[int, float]:
        """The learning rate for each k."""
        return {knee.k: knee.learning_rate for knee in self.knees}

    def _facts(self) -> Mapping[str, object]:
        return {"job": self.job, "protocol": self.protocol, "learning_rates": self.learning_rates}

    def _grids(self) -> list[TextTable]:
        rows = [[str(knee.k), f"{knee.learning_rate:.3g}", f"{knee.loss:.3g}"] for knee in self.knees]
        return [TextTable(["k", "learning rate", "loss there"], rows, left=())]

    def _notes(self) -> list[str]:
        return [
            f"k = {knee.k}: the loss has not risen up to the rate {knee.rates[-1]:.3g}, so the knee may lie higher."
            for knee in self.knees
            if knee.is_bound
        ]

    def to_json(self) -> bytes:
        """Return everything, curves included."""
        import orjson

        return orjson.dumps(self, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


@checked_types
def knee(
    job: Job,
    *,
    protocol: str,
    k: int | Sequence[int],
    cluster: AnyCluster,
    lowest: float = 1e-3,
    highest: float = 1.0,
    updates: int = 400,
    seed: int = 0,
    runs: int = 3,
    progress: bool | None = None,
    watch: Watch | None = None,
) -> Knees:
    """Find the learning rate for each quorum k by the knee rule: the largest one at which training gets on.

    For each k, the job is trained with a learning rate that rises with every update from `lowest` to `highest`
    or until it diverges, and `find_knee` reads the curve of its loss.

    The rates are those of the optimizer's first parameter group; the others keep their ratio to it. What is found
    is the total rate of an update of k gradients, as with lr_rule="constant": the job's own lr_rule, lr_is,
    scheduler and schedule are left out of the runs, and nothing is evaluated.

    Args:
        job: what to train.
        protocol: the name of one with a quorum k, as "k_sync".
        k: a quorum, or several, as [1, 4, 8, 16].
        cluster: as for `train`.
        lowest: rate of the first update, > 0.
        highest: rate of the last one, > lowest.
        updates: of a run, >= 10. With few of them a small rate has no time to lower the loss, nor one that is only a
            little too large to raise it.
        seed: of the first run, >= 0; the next ones count on from it.
        runs: for each k, >= 1; their mean curve is read.
        progress: whether to show how each run is doing, as for `train`.
        watch: shows it instead: gives the callback for a run, from the run's name and stop.

    Raises:
        UsageError: what was asked for cannot work; nothing has run.
        RunError: a run failed, and not because its rate was too large; or the loss never fell.

    Example:
        >>> import paceline as pl
        >>> job = pl.jobs.digits()
        >>> list(pl.knee(job, protocol="k_sync", k=[1, 2], cluster="2*exp(mean=1)", updates=20).learning_rates)
        [1, 2]

    Source: Smith, "Cyclical learning rates for training neural networks", WACV 2017, Sect. 3.3; Xu et al. (DBW)
    2020, Sect. 4.
    """
    refuse_while_unpickling()
    cluster = without_torchrun(parse_cluster(cluster) if isinstance(cluster, str) else cluster, "knee")
    check_range("[0, inf)", Integral, seed=seed)
    check_range("[1, inf)", Integral, runs=runs)
    shows = progress if watch is None else False
    tried = Range(lowest, highest, updates)
    search = _Search(job, cluster, tried, range(seed, seed + runs), watch or _unwatched, shows)
    protocols = {each: _protocol(protocol, each, cluster) for each in _quorums(k)}
    knees = tuple(search.knee(made, each) for each, made in protocols.items())
    return Knees(job.name, protocol, str(cluster), tuple(search.seeds), knees)


def _unwatched(title: str, stop: Stop) -> AbstractContextManager[Callback]:
    return nullcontext(Callback())


def _quorums(k: int | Sequence[int]) -> list[int]:
    quorums = [k] if isinstance(k, int) else list(k)
    if not quorums or len(set(quorums)) < len(quorums):
        raise UsageError(f"k = {k!r}, expected a quorum or several different ones, as k=[1, 4, 8]")
    return quorums


def _protocol(name: str, k: int, cluster: Cluster | LocalCluster) -> Protocol:
    """Return the protocol of that name with that quorum, or refuse what has none or cannot run."""
    with_k = [known for known, factory in CATALOGUE.items() if "k" in signature(factory).parameters]
    if not isinstance(name, str):
        raise UsageError(f"protocol = {name!r}, expected the name of a protocol, as 'k_sync'")
    call = parse_call(name)
    if call.name not in CATALOGUE:
        raise UsageError(f"{call.name!r} is not known{did_you_mean(call.name, with_k)}")
    if call.name not in with_k:
        raise UsageError(f"{call.name!r} has no quorum k to find a rate for; give one of {', '.join(with_k)}")
    if call.kwargs:
        raise UsageError(f"{name!r} comes with knobs; give the name alone, {call.name!r}, and the k's beside it")
    protocol = CATALOGUE[call.name](k)
    assert isinstance(protocol, Protocol)
    cluster.check_plan(as_plan(protocol).checked(cluster.n, total=None, per_epoch=None))
    return protocol


@dataclass(frozen=True)
class _Search:
    """What is the same for every quorum."""

    job: Job
    cluster: Cluster | LocalCluster
    tried: Range
    seeds: range
    watch: Watch
    progress: bool | None

    def knee(self, protocol: Protocol, k: int) -> Knee:
        """Return the knee of one quorum."""
        runs = [self._losses(protocol, k, seed) for seed in self.seeds]
        losses = smoothed(averaged(runs, self.tried.updates))
        try:
            reading = find_knee(self.tried.rates, losses)
        except RunError as error:
            raise RunError(f"{protocol}: {error}") from error
        return Knee(k, reading.learning_rate, reading.is_bound, tuple(self.tried.rates), tuple(losses[1:]))

    def _losses(self, protocol: Protocol, k: int, seed: int) -> list[float]:
        """Return the loss before the first update of a run, after the first, after the second, ..."""
        job = replace(
            self.job,
            scheduler=partial(rising, tried=self.tried, k=k),
            schedule_unit="gradient",
            schedule=None,
            lr_rule="constant",
            lr_is="total",
            eval_data=None,
        )
        stop = Stop(updates=self.tried.updates + 1)  # the last one shows the loss after the one before
        with self.watch(f"{protocol}  seed {seed}", stop) as callback:
            try:
                result = train(
                    job,
                    protocol=protocol,
                    cluster=self.cluster,
                    stop=stop,
                    seed=seed,
                    callbacks=[callback],
                    progress=self.progress,
                )
            except PacelineError as error:
                raise type(error)(f"{protocol}, seed {seed}: {error}") from error
            except Exception as error:
                error.add_note(f"in the run of {protocol}, seed {seed}")
                raise
        if result.stopped_by is Outcome.INTERRUPTED:
            raise KeyboardInterrupt
        if result.stopped_by.is_failure and result.stopped_by is not Outcome.NOT_FINITE:
            raise RunError(f"{protocol}, seed {seed}: {result.reason}")
        columns = result.history.columns()
        if any(columns["k"] != k):
            raise RunError(
                f"{protocol}, seed {seed}: an update was made of fewer than {k} gradients, because workers were lost; "
                "start again on a cluster that keeps its workers"
            )
        return [float(loss) for loss in columns["loss"]]


@dataclass(frozen=True)
class _Factor:
    """The learning rate after so many gradients, divided by the optimizer's own."""

    tried: Range
    k: int
    own: float

    def __call__(self, gradients: int) -> float:
        return self.tried.rate(1 + gradients // self.k) / self.own


def rising(optimizer: torch.optim.Optimizer, tried: Range, k: int) -> LambdaLR:
    """Return the scheduler that is stepped once a gradient and gives each update of k gradients a rate of its own."""
    own = float(optimizer.param_groups[0]["lr"])
    if not own > 0:
        raise UsageError(f"the learning rate of the job's optimizer is {own:g}; expected one > 0, which is scaled")
    return LambdaLR(optimizer, _Factor(tried, k, own))
