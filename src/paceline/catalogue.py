"""Every named protocol, with its knobs and its paper."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from inspect import signature
from math import inf
from numbers import Integral
from operator import rshift
from typing import Any, Literal, TypeVar

from paceline.argument_types import checked_types
from paceline.checks import check
from paceline.compensation.base import Compensator
from paceline.compensation.delay import DCASGD, DCS3GD
from paceline.compensation.staleness_lr import StalenessLR
from paceline.compensation.staleness_weight import StalenessWeight
from paceline.controllers.adasync import AdaSync
from paceline.controllers.b_dbw import BDBW
from paceline.controllers.base import Controller
from paceline.controllers.dbw import DBW
from paceline.controllers.idle_workers import IdleWorkers
from paceline.controllers.sync_switch import Elastic, Greedy, Stragglers
from paceline.errors import UsageError, did_you_mean
from paceline.estimators.duration import Unobserved
from paceline.extent import Extent
from paceline.momentum_limit import Momentum
from paceline.protocols import Phase, Plan, Protocol, as_plan
from paceline.reduction import Reduction
from paceline.switch_timing import SwitchTiming
from paceline.text import bind, parse_call, split_top

F = TypeVar("F", bound=Callable[..., Protocol | Phase])

CATALOGUE: dict[str, Callable[..., Protocol | Phase]] = {}


def named(factory: F) -> F:
    """List a protocol in the catalogue, under the name of the function that makes it."""
    CATALOGUE[factory.__name__] = factory
    return factory


@named
@checked_types
def bsp() -> Protocol:
    """Bulk synchronous parallel: every update waits for one gradient of every live worker.

    Paper: Valiant, "A bridging model for parallel computation", 1990.
    """
    return Protocol("all", 0, "update", name="bsp")


@named
@checked_types
def backup(k: int) -> Protocol:
    """Backup workers, Push & Wait: the k fastest make the update, the others finish and are dropped.

    Paper: Chen et al., "Revisiting distributed synchronous SGD", 2016; Xu et al. (DBW) 2020, Sect. 2.
    """
    return Protocol(k, 0, "update", name=f"backup(k={k})")


@named
@checked_types
def k_sync(k: int) -> Protocol:
    """K-sync, or backup workers, Push & Interrupt: the k fastest make the update, the others restart.

    Paper: Dutta et al., "Slow and stale gradients can win the race", 2018.
    """
    return Protocol(k, 0, "update", "interrupt", name=f"k_sync(k={k})")


@named
@checked_types
def pull(k: int) -> Protocol:
    """Backup workers, Pull, or Rennala SGD: the first k fresh gradients, whoever sends them.

    Paper: Xu et al. (DBW) 2020, Sect. 2; Tyurin and Richtarik, "Optimal time complexities", 2023.
    """
    return Protocol(k, 0, "arrival", name=f"pull(k={k})")


@named
@checked_types
def k_batch_sync(k: int) -> Protocol:
    """K-batch-sync: as `pull`, and work that became stale is interrupted.

    Paper: Dutta et al. 2018.
    """
    return Protocol(k, 0, "arrival", "interrupt", name=f"k_batch_sync(k={k})")


@named
@checked_types
def k_async(k: int) -> Protocol:
    """K-async: k gradients of different workers, however stale.

    Paper: Dutta et al. 2018.
    """
    return Protocol(k, inf, "update", name=f"k_async(k={k})")


@named
@checked_types
def k_batch_async(k: int) -> Protocol:
    """K-batch-async, or FedBuff: any k gradients, however stale; no worker ever waits.

    Paper: Dutta et al. 2018; Nguyen et al., "Federated learning with buffered asynchronous aggregation", 2022.
    """
    return Protocol(k, inf, "arrival", name=f"k_batch_async(k={k})")


@named
@checked_types
def asp() -> Protocol:
    """Asynchronous parallel: every gradient is an update.

    Paper: Dean et al., "Large scale distributed deep networks", 2012.
    """
    return Protocol(1, inf, "arrival", name="asp")


@named
@checked_types
def ssp(lead: int) -> Protocol:
    """Stale synchronous parallel: asynchronous, but nobody gets more than `lead` gradients ahead.

    Paper: Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", 2013.
    """
    return Protocol(1, inf, "arrival", max_lead=lead, name=f"ssp(lead={lead})")


@named
@checked_types
def ringmaster(r: int, stops: bool = False) -> Protocol:
    """Ringmaster ASGD: asynchronous, gradients r or more versions old are dropped, or stopped with `stops`.

    Paper: Maranjyan, Tyurin and Richtarik, "Ringmaster ASGD", 2025.
    """
    name = f"ringmaster(r={r}, stops=true)" if stops else f"ringmaster(r={r})"
    if not isinstance(r, int) or r < 1:
        raise UsageError(f"{name}: r = {r!r}, expected a whole number >= 1")
    return Protocol(1, r - 1, "arrival", "interrupt" if stops else "finish", name=name)


@named
@checked_types
def dbw(
    base: str = "backup",
    D: int = 5,
    beta: float = 1.01,
    no_gain: Literal["all", "keep"] = "all",
    unobserved: Unobserved = "lower",
    window: int | None = None,
    forgetting: float = 1.0,
    late: bool = True,
    release_idle: bool = False,
) -> Phase:
    """Dynamic backup workers: the k whose update lowers the loss fastest, chosen anew for every update.

    Paper: Xu, Neglia, Sebastianelli, "Dynamic backup workers for parallel machine learning", 2020.
    """
    given = locals()
    controller = DBW(D, beta, no_gain, unobserved, window, forgetting, late)
    return _controlled(dbw, given, "all", controller, IdleWorkers(release=release_idle))


@named
@checked_types
def b_dbw(
    base: str = "backup",
    unobserved: Unobserved = "lower",
    window: int | None = None,
    forgetting: float = 1.0,
    late: bool = True,
    release_idle: bool = False,
) -> Phase:
    """Blind DBW: the k that brings the most gradients a second, whatever they are worth.

    Paper: Teng and Wood, "Bayesian distributed stochastic gradient descent", 2018; Xu et al. (DBW) 2020, Sect. 4.
    """
    given = locals()
    controller = BDBW(unobserved, window, forgetting, late)
    return _controlled(b_dbw, given, "all", controller, IdleWorkers(release=release_idle))


@named
@checked_types
def adasync(base: str = "k_sync", K_0: int = 1, D: int = 5) -> Phase:
    """AdaSync: more gradients an update as the loss falls.

    Paper: Dutta, Wang, Joshi, "Slow and stale gradients can win the race", 2020 (arXiv:2003.10579).
    """
    return _controlled(adasync, locals(), K_0, AdaSync(K_0, D))


@named
@checked_types
def all_reduce() -> Phase:
    """All-reduce SGD: no server; all step with the mean of their gradients, which they wait for.

    Paper: Goyal et al., "Accurate, large minibatch SGD", 2017; PyTorch's DistributedDataParallel.
    """
    return _serverless(Reduction("gradients"), "all_reduce")


@named
@checked_types
def local_sgd(H: int) -> Phase:
    """Local SGD: no server; every worker trains for itself, and every H gradients they take their average.

    Paper: Stich, "Local SGD converges fast and communicates little", 2019.
    """
    check("[1, inf)", Integral, H=H)
    return _serverless(Reduction("updates", period=H), f"local_sgd(H={H})")


@named
@checked_types
def s3gd() -> Phase:
    """Stale-synchronous SGD: no server; the next gradient is computed while the mean of the updates is made.

    Paper: Rigazzi, "DC-S3GD", 2019, without its compensation.
    """
    return _serverless(Reduction("updates", overlaps=True), "s3gd")


@named
@checked_types
def dc_s3gd(lambda0: float = 0.2) -> Phase:
    """Delay-compensated stale-synchronous SGD: as `s3gd`, gradients corrected; after a plus the correction alone.

    Paper: Rigazzi, "DC-S3GD: delay-compensated stale-synchronous SGD", 2019, Algorithm 1 and eq. 7 to 12, 17.
    """
    correction = DCS3GD(lambda0)
    name = repr(correction).removesuffix("()")
    return _serverless(Reduction("updates", overlaps=True, correction=correction), name)


def _serverless(reduction: Reduction, name: str) -> Phase:
    return Phase(replace(bsp(), name=name), reduction=reduction)


CONTROLLED = ("backup", "k_sync", "pull", "k_batch_sync", "k_async", "k_batch_async")


def _controlled(
    factory: Callable[..., Phase],
    given: Mapping[str, Any],
    quorum: int | Literal["all"],
    *controllers: Controller[Any],
) -> Phase:
    """Return the phase of a base protocol whose quorum is controlled, named as it would be typed."""
    name, base = factory.__name__, given["base"]
    if base not in CONTROLLED:
        raise UsageError(f"{name}: base = {base!r} is no protocol with a quorum k{did_you_mean(str(base), CONTROLLED)}")
    defaults = signature(factory).parameters
    told = [f"{knob}={str(v).lower()}" for knob, v in given.items() if v != defaults[knob].default]
    name = f"{name}({', '.join(told)})" if told else name
    protocol = CATALOGUE[base](k=1)
    assert isinstance(protocol, Protocol)
    return Phase(replace(protocol, quorum=quorum, name=name), controllers, name=name)


@checked_types
def staleness_lr(C: float | None = None, error_floor: float | None = None) -> StalenessLR:
    """Staleness learning rate: steps shrink with the squared distance moved since their gradient read the parameters.

    Paper: Dutta et al. 2018, eq. 13.
    """
    return StalenessLR(C, error_floor)


@checked_types
def staleness_weight(weighting: str | Callable[[int], float] = "1/(1+tau)") -> StalenessWeight:
    """Staleness weight: steps shrink with the versions made since, as 1/(1+tau), 1/sqrt(1+tau) or 1/(1+sqrt(tau)).

    Paper: Zhang et al., "Staleness-aware async-SGD", 2016; Nguyen et al. (FedBuff) 2022.
    """
    return StalenessWeight(weighting)


@checked_types
def dc_asgd(lambda0: float, m: float | None = None, epsilon: float = 1e-7) -> DCASGD:
    """Delay compensation: gradients are moved to the present by a first-order step, with m by an adaptive one.

    Paper: Zheng et al., "Asynchronous stochastic gradient descent with delay compensation", 2017.
    """
    return DCASGD(lambda0, m, epsilon)


@checked_types
def stragglers(
    window: int = 2, consecutive: int = 2, min_gap: float = 0.2, sliding: bool = False, persistent_s: float = 100.0
) -> Stragglers:
    """Straggler detection: who falls behind is put on record.

    Paper: Li et al., "Sync-Switch", 2021, Sect. IV-B2.
    """
    return Stragglers(window, consecutive, min_gap, sliding, persistent_s)


@checked_types
def greedy(
    window: int = 2, consecutive: int = 2, min_gap: float = 0.2, sliding: bool = False, persistent_s: float = 100.0
) -> Greedy:
    """Greedy online policy: asynchronous while there is a straggler.

    Paper: Li et al., "Sync-Switch", 2021, Sect. IV-B2.
    """
    return Greedy(window, consecutive, min_gap, sliding, persistent_s)


@checked_types
def elastic(
    window: int = 2, consecutive: int = 2, min_gap: float = 0.2, sliding: bool = False, persistent_s: float = 100.0
) -> Elastic:
    """Elastic online policy: stragglers are set aside until they have recovered.

    Paper: Li et al., "Sync-Switch", 2021, Sect. IV-B2.
    """
    return Elastic(window, consecutive, min_gap, sliding, persistent_s)


@checked_types
def momentum(rule: str) -> Momentum:
    """Momentum after a switch: "keep", "zero", "1/n", or ramps "i/n" and "2^i/n" by epoch.

    Paper: Li et al., "Sync-Switch", 2021, Fig. 8b.
    """
    return Momentum(rule)


ADDITIONS: Mapping[str, Callable[..., Compensator | Controller[Any] | Momentum]] = {
    "staleness_lr": staleness_lr,
    "staleness_weight": staleness_weight,
    "dc_asgd": dc_asgd,
    "dc_s3gd": DCS3GD,
    "stragglers": stragglers,
    "greedy": greedy,
    "elastic": elastic,
    "momentum": momentum,
}
"""What can stand after a plus."""


@checked_types(fraction=", a share of the workload between 0 and 1, as 0.0625")
def sync_switch(
    fraction: float | None = None, timing: str | None = None, first: str | None = None, then: str | None = None
) -> Plan:
    """Sync-Switch: first (bsp) for a fraction of the workload, then (asp); the fraction, or the file of a search.

    Paper: Li et al., "Sync-Switch: hybrid parameter synchronization for distributed deep learning", 2021.
    """
    if (fraction is None) == (timing is None):
        raise UsageError(
            "sync_switch needs either a fraction or the timing file of a search; type sync_switch(fraction=0.0625) or "
            "sync_switch(timing=FILE)"
        )
    if timing is not None:
        found = SwitchTiming.read(timing)
        for knob, given, searched in (("first", first, found.first), ("then", then, found.then)):
            if given is not None and _typed_phase(given, knob).protocol != _typed_phase(searched, knob).protocol:
                raise UsageError(
                    f"{timing} was found for {knob} = {searched!r}, and {given!r} is another protocol; search again, "
                    f"or add to the one that was searched with, as {knob}='{searched} + stragglers'"
                )
        plan = switch_plan(found.fraction, first or found.first, then or found.then)
        return replace(plan, found_for=found.found_for)
    assert fraction is not None
    if not 0 < fraction < 1:
        raise UsageError(f"sync_switch: fraction = {fraction!r}, expected a share between 0 and 1{_instead(fraction)}")
    return switch_plan(fraction, first or "bsp", then or "asp")


def switch_plan(fraction: float, first: str, then: str) -> Plan:
    """Return the plan of one protocol for a fraction of the workload and another for the rest.

    Args:
        fraction: in (0, 1]; with 1, the first protocol is the whole plan.
        first: as it is typed, with what is added to it, as "bsp" or "k_async(k=2) + staleness_lr"; without an end.
        then: likewise.
    """
    begins, goes_on = _typed_phase(first, "first"), _typed_phase(then, "then")
    return as_plan(begins) if fraction == 1 else begins.until(fraction) >> goes_on


def _typed_phase(text: str, knob: str) -> Phase:
    plan = parse_plan(text) if isinstance(text, str) else None
    if plan is None or len(plan.phases) > 1 or plan.phases[0].end is not None:
        raise UsageError(f"{knob} = {text!r}, expected the text of one protocol without an end, as 'ssp(lead=2)'")
    return plan.phases[0]


def _instead(fraction: object) -> str:
    if not isinstance(fraction, int | float) or not 0 <= fraction <= 100:
        return ", as 0.0625"
    if fraction in (0, 1):
        return f"; there would be no switch, so type {'the second' if fraction == 0 else 'the first'} protocol alone"
    return f"; if this is percent, type {fraction / 100:g}"


PLANS: Mapping[str, Callable[..., Plan]] = {"sync_switch": sync_switch}


def parse_plan(text: str) -> Plan:
    """Read a plan such as ``k_sync(k=12)``, ``bsp@25% >> asp`` or ``asp + staleness_lr(C=0.01)``.

    After ``+`` stands what is done about stale gradients, stragglers or the momentum, after ``@`` the point of the run
    at which a part ends: ``25%`` of the workload, ``updates=100``, ``gradients=6400``, ``epochs=2`` or ``seconds=60``.

    >>> print(parse_plan("bsp@25% >> k_sync(k=3)@epochs=2 >> asp"))
    bsp until 0.25 of the workload >> k_sync(k=3) until 2 epochs >> asp
    >>> print(parse_plan("sync_switch(fraction=0.25, then='ssp(lead=2)')"))
    bsp until 0.25 of the workload >> ssp(lead=2)
    """
    *firsts, last = [_parse_part(part) for part in split_top(text, ">>")]
    for part in firsts:
        if len(part.phases) > 1:
            raise UsageError(f"{part} runs to the end of the run, so {last} is never reached; type it last, or alone")
    return reduce(rshift, [*firsts, last])


def _parse_part(text: str) -> Plan:
    call, *ends = split_top(text, "@")
    if len(ends) > 1:
        raise UsageError(f"{text!r} has two ends; expected one, as in bsp@25%")
    protocol, *additions = split_top(call, "+")
    given = bind(parse_call(protocol), {**CATALOGUE, **PLANS})
    if isinstance(given, Plan):
        _refuse_more(protocol.strip(), additions, ends)
        return given
    phase = given if isinstance(given, Phase) else Phase(given)
    phase += tuple(bind(parse_call(each), ADDITIONS) for each in additions)
    return as_plan(replace(phase, end=_parse_end(call.strip(), ends[0])) if ends else phase)


def _parse_end(call: str, text: str) -> Extent:
    try:
        return Extent.parse(text)
    except UsageError:
        end, plus, addition = (each.strip() for each in text.partition("+"))
        if not plus:
            raise
        raise UsageError(f"{text.strip()!r}: the end comes last; type {call} + {addition}@{end}") from None


def _refuse_more(name: str, additions: Sequence[str], ends: Sequence[str]) -> None:
    """Refuse what is typed after a name that stands for several parts, of which none is meant."""
    if additions:
        addition = additions[0].strip()
        raise UsageError(
            f"{name} has two parts, and nobody can tell which {addition} is for; type it in first= or then=, as "
            f"sync_switch(fraction=0.25, then='asp + {addition}')"
        )
    if ends:
        raise UsageError(f"{name} runs to the end of the run; leave @{ends[0].strip()} out")
