"""`lr_range_test`: the learning rate for each quorum k, by learning-rate range tests."""

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
from paceline.clusters.parser import parse_cluster, without_launcher
from paceline.clusters.simulated import Cluster
from paceline.core.events import Outcome
from paceline.core.stop import Stop
from paceline.errors import PacelineError, RunError, UsageError, did_you_mean
from paceline.experiments.lr_range_test.curve import Range, averaged, find_knee, smoothed
from paceline.jobs.job import Job
from paceline.processes.shared_pickle import refuse_while_unpickling
from paceline.protocols.plan_checks import checked_plan
from paceline.protocols.protocol import Protocol, as_plan
from paceline.recording.callback import Callback
from paceline.run.train import AnyCluster, train
from paceline.utils.argument_types import checked_types
from paceline.utils.representation import Representation, TableRepresentation
from paceline.utils.spec_parser import parse_call
from paceline.utils.text_table import TextTable
from paceline.utils.validation import check_range

Watch = Callable[[str, Stop], AbstractContextManager[Callback]]


@dataclass(frozen=True, repr=False, kw_only=True)
class Knee(Representation):
    """Learning rate for one quorum, with its loss curve.

    Attributes:
        k: number of gradients of an update, >= 1.
        learning_rate: learning rate at the knee.
        is_bound: whether the loss did not rise up to the highest rate, so that the knee may lie higher.
        rates: learning rates of the test, rising.
        losses: loss after the update at each rate, smoothed mean over the runs.
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
        """Smoothed loss after the update at the knee."""
        return self.losses[self.rates.index(self.learning_rate)]


@dataclass(frozen=True, repr=False, kw_only=True)
class LRRangeTest(TableRepresentation):
    """Learning rates of several quorums, with the loss curves that they are read from.

    Attributes:
        job: name of the job.
        protocol: name of the protocol, without k.
        cluster: text of the cluster.
        seeds: seeds of the runs for each k.
        knees: knee for each k, in the given order.
    """

    job: str
    protocol: str
    cluster: str
    seeds: tuple[int, ...]
    knees: tuple[Knee, ...]

    @property
    def learning_rates(self) -> dict[int, float]:
        """Learning rate by k."""
        return {knee.k: knee.learning_rate for knee in self.knees}

    def _facts(self) -> Mapping[str, object]:
        return {"job": self.job, "protocol": self.protocol, "learning_rates": self.learning_rates}

    def _grids(self) -> list[TextTable]:
        rows = [[str(knee.k), f"{knee.learning_rate:.3g}", f"{knee.loss:.3g}"] for knee in self.knees]
        return [TextTable(["k", "learning rate", "loss there"], rows, left=())]

    def _notes(self) -> list[str]:
        return [
            f"k = {knee.k}: the loss did not rise up to the rate {knee.rates[-1]:.3g}, so the knee may lie higher."
            for knee in self.knees
            if knee.is_bound
        ]

    def to_json(self) -> bytes:
        """Return all values as JSON, curves included."""
        import orjson

        return orjson.dumps(self, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


@checked_types
def lr_range_test(
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
) -> LRRangeTest:
    """Find the learning rate for each quorum k by the knee rule: the largest rate at which training progresses.

    For each k, the job is trained with a learning rate that rises with every update from ``lowest`` to ``highest``, or
    until training diverges. ``find_knee`` returns the knee of the loss curve.

    The rates are those of the optimizer's first parameter group; the other groups keep their ratios to it. The result
    is the total rate of an update of k gradients, as with lr_rule="constant". The runs ignore lr_rule, lr_is, scheduler
    and schedule of the job, and do not evaluate.

    Args:
        job: job to train.
        protocol: name of a protocol with a quorum k, for example "k_sync".
        k: quorum, >= 1, or several, for example [1, 4, 8, 16].
        cluster: cluster of every run, as for `train`.
        lowest: learning rate of the first update, > 0.
        highest: learning rate of the last update, > lowest.
        updates: number of updates of a run, >= 10. With few, small rates hardly lower the loss, and slightly too
            large rates hardly raise it.
        seed: seed of the first run, >= 0; each further run has the next seed.
        runs: number of runs for each k, >= 1; the knee is that of their mean curve.
        progress: whether to show the progress of each run, as for `train`.
        watch: function from the name and the stop of a run to a context manager with a callback, which shows the
            progress instead.

    Raises:
        UsageError: an argument is invalid; nothing has run.
        RunError: a run failed for another reason than a large rate, or the loss never fell.

    Example:
        >>> import paceline as pl
        >>> job = pl.jobs.digits()
        >>> found = pl.lr_range_test(job, protocol="k_sync", k=[1, 2], cluster="2*exp(mean=1)", updates=20)
        >>> list(found.learning_rates)
        [1, 2]

    Source: Smith, "Cyclical learning rates for training neural networks", WACV 2017, Sect. 3.3; Xu et al. (DBW)
    2020, Sect. 4.
    """
    refuse_while_unpickling()
    cluster = without_launcher(parse_cluster(cluster) if isinstance(cluster, str) else cluster, "lr_range_test")
    check_range("[0, inf)", Integral, seed=seed)
    check_range("[1, inf)", Integral, runs=runs)
    shows = progress if watch is None else False
    rates = Range(lowest, highest, updates)
    search = _Search(
        job=job, cluster=cluster, rates=rates, seeds=range(seed, seed + runs), watch=watch or _unwatched, progress=shows
    )
    protocols = {each: _protocol(protocol, each, cluster) for each in _quorums(k)}
    knees = tuple(search.knee(made, each) for each, made in protocols.items())
    return LRRangeTest(job=job.name, protocol=protocol, cluster=str(cluster), seeds=tuple(search.seeds), knees=knees)


def _unwatched(title: str, stop: Stop) -> AbstractContextManager[Callback]:
    return nullcontext(Callback())


def _quorums(k: int | Sequence[int]) -> list[int]:
    quorums = [k] if isinstance(k, int) else list(k)
    if not quorums or len(set(quorums)) < len(quorums):
        raise UsageError(f"k={k!r}, expected a quorum or several different ones, for example k=[1, 4, 8]")
    return quorums


def _protocol(name: str, k: int, cluster: Cluster | LocalCluster) -> Protocol:
    """Return the protocol of a name with a quorum.

    Raises:
        UsageError: the name is unknown, the protocol has no quorum, or it cannot run on the cluster.
    """
    with_k = [known for known, factory in CATALOGUE.items() if "k" in signature(factory).parameters]
    if not isinstance(name, str):
        raise UsageError(f"protocol={name!r}, expected the name of a protocol, for example 'k_sync'")
    call = parse_call(name)
    if call.name not in CATALOGUE:
        raise UsageError(f"{call.name!r} is not known{did_you_mean(call.name, with_k)}")
    if call.name not in with_k:
        raise UsageError(f"{call.name!r} has no quorum k; give one of {', '.join(with_k)}")
    if call.kwargs:
        raise UsageError(f"{name!r} has knobs; give the name alone, {call.name!r}, and k as an argument")
    protocol = CATALOGUE[call.name](k)
    assert isinstance(protocol, Protocol)
    cluster.check_plan(checked_plan(as_plan(protocol), cluster.n, total=None, per_epoch=None))
    return protocol


@dataclass(frozen=True, kw_only=True)
class _Search:
    """Range tests of one job on one cluster, for any quorum."""

    job: Job
    cluster: Cluster | LocalCluster
    rates: Range
    seeds: range
    watch: Watch
    progress: bool | None

    def knee(self, protocol: Protocol, k: int) -> Knee:
        """Return the knee of one quorum."""
        runs = [self._losses(protocol, k, seed) for seed in self.seeds]
        losses = smoothed(averaged(runs, self.rates.updates))
        try:
            point = find_knee(self.rates.rates, losses)
        except RunError as error:
            raise RunError(f"{protocol}: {error}") from error
        return Knee(
            k=k,
            learning_rate=point.learning_rate,
            is_bound=point.is_bound,
            rates=tuple(self.rates.rates),
            losses=tuple(losses[1:]),
        )

    def _losses(self, protocol: Protocol, k: int, seed: int) -> list[float]:
        """Return the initial loss of a run and the loss after each update."""
        job = replace(
            self.job,
            scheduler=partial(rising, rates=self.rates, k=k),
            schedule_unit="gradient",
            schedule=None,
            lr_rule="constant",
            lr_is="total",
            eval_data=None,
        )
        stop = Stop(updates=self.rates.updates + 1)  # the last update measures the loss after the one before
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
                f"{protocol}, seed {seed}: an update had fewer than {k} gradients, because workers were lost; "
                "repeat the test on a cluster without lost workers"
            )
        return [float(loss) for loss in columns["loss"]]


def _factor(gradients: int, rates: Range, k: int, base: float) -> float:
    """Return the learning rate after a number of gradients, relative to that of the optimizer."""
    return rates.rate(1 + gradients // k) / base


def rising(optimizer: torch.optim.Optimizer, rates: Range, k: int) -> LambdaLR:
    """Return a scheduler for one step per gradient, with a learning rate for each update of k gradients."""
    base = float(optimizer.param_groups[0]["lr"])
    if not base > 0:
        raise UsageError(f"the learning rate of the job's optimizer is {base:g}; give one > 0, which the test scales")
    return LambdaLR(optimizer, partial(_factor, rates=rates, k=k, base=base))
