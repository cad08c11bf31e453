"""Every named protocol, with its knobs and its paper."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import signature
from math import inf
from typing import Any, Literal, TypeVar

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
from paceline.momentum_limit import Momentum
from paceline.protocols import Extent, Phase, Plan, Protocol
from paceline.text import bind, parse_call, split_top

F = TypeVar("F", bound=Callable[..., Protocol | Phase])

CATALOGUE: dict[str, Callable[..., Protocol | Phase]] = {}


def named(factory: F) -> F:
    """List a protocol in the catalogue, under the name of the function that makes it."""
    CATALOGUE[factory.__name__] = factory
    return factory


@named
def bsp() -> Protocol:
    """Bulk synchronous parallel: every update waits for one gradient of every live worker.

    Paper: Valiant, "A bridging model for parallel computation", 1990.
    """
    return Protocol("all", 0, "update", name="bsp")


@named
def backup(k: int) -> Protocol:
    """Backup workers, Push & Wait: the k fastest make the update, the others finish and are dropped.

    Paper: Chen et al., "Revisiting distributed synchronous SGD", 2016; Xu et al. (DBW) 2020, Sect. 2.
    """
    return Protocol(k, 0, "update", name=f"backup(k={k})")


@named
def k_sync(k: int) -> Protocol:
    """K-sync, or backup workers, Push & Interrupt: the k fastest make the update, the others restart.

    Paper: Dutta et al., "Slow and stale gradients can win the race", 2018.
    """
    return Protocol(k, 0, "update", "interrupt", name=f"k_sync(k={k})")


@named
def pull(k: int) -> Protocol:
    """Backup workers, Pull, or Rennala SGD: the first k fresh gradients, whoever sends them.

    Paper: Xu et al. (DBW) 2020, Sect. 2; Tyurin and Richtarik, "Optimal time complexities", 2023.
    """
    return Protocol(k, 0, "arrival", name=f"pull(k={k})")


@named
def k_batch_sync(k: int) -> Protocol:
    """K-batch-sync: as `pull`, and work that became stale is interrupted.

    Paper: Dutta et al. 2018.
    """
    return Protocol(k, 0, "arrival", "interrupt", name=f"k_batch_sync(k={k})")


@named
def k_async(k: int) -> Protocol:
    """K-async: k gradients of different workers, however stale.

    Paper: Dutta et al. 2018.
    """
    return Protocol(k, inf, "update", name=f"k_async(k={k})")


@named
def k_batch_async(k: int) -> Protocol:
    """K-batch-async, or FedBuff: any k gradients, however stale; no worker ever waits.

    Paper: Dutta et al. 2018; Nguyen et al., "Federated learning with buffered asynchronous aggregation", 2022.
    """
    return Protocol(k, inf, "arrival", name=f"k_batch_async(k={k})")


@named
def asp() -> Protocol:
    """Asynchronous parallel: every gradient is an update.

    Paper: Dean et al., "Large scale distributed deep networks", 2012.
    """
    return Protocol(1, inf, "arrival", name="asp")


@named
def ssp(lead: int) -> Protocol:
    """Stale synchronous parallel: asynchronous, but nobody gets more than `lead` gradients ahead.

    Paper: Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", 2013.
    """
    return Protocol(1, inf, "arrival", max_lead=lead, name=f"ssp(lead={lead})")


@named
def ringmaster(r: int, stops: bool = False) -> Protocol:
    """Ringmaster ASGD: asynchronous, gradients r or more versions old are dropped, or stopped with `stops`.

    Paper: Maranjyan, Tyurin and Richtarik, "Ringmaster ASGD", 2025.
    """
    name = f"ringmaster(r={r}, stops=true)" if stops else f"ringmaster(r={r})"
    if not isinstance(r, int) or r < 1:
        raise UsageError(f"{name}: r = {r!r}, expected a whole number >= 1")
    return Protocol(1, r - 1, "arrival", "interrupt" if stops else "finish", name=name)


@named
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
def adasync(base: str = "k_sync", K_0: int = 1, D: int = 5) -> Phase:
    """AdaSync: more gradients an update as the loss falls.

    Paper: Dutta, Wang, Joshi, "Slow and stale gradients can win the race", 2020 (arXiv:2003.10579).
    """
    return _controlled(adasync, locals(), K_0, AdaSync(K_0, D))


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


def staleness_lr(C: float | None = None, error_floor: float | None = None) -> StalenessLR:
    """Staleness learning rate: steps shrink with the squared distance moved since their gradient read the parameters.

    Paper: Dutta et al. 2018, eq. 13.
    """
    return StalenessLR(C, error_floor)


def staleness_weight(weighting: str | Callable[[int], float] = "1/(1+tau)") -> StalenessWeight:
    """Staleness weight: steps shrink with the versions made since, as 1/(1+tau), 1/sqrt(1+tau) or 1/(1+sqrt(tau)).

    Paper: Zhang et al., "Staleness-aware async-SGD", 2016; Nguyen et al. (FedBuff) 2022.
    """
    return StalenessWeight(weighting)


def dc_asgd(lambda_0: float, m: float | None = None, epsilon: float = 1e-7) -> DCASGD:
    """Delay compensation: gradients are moved to the present by a first-order step, with m by an adaptive one.

    Paper: Zheng et al., "Asynchronous stochastic gradient descent with delay compensation", 2017.
    """
    return DCASGD(lambda_0, m, epsilon)


def dc_s3gd(lambda_0: float = 0.2) -> DCS3GD:
    """Delay compensation with a correction that is lambda_0 times as long as the gradient.

    Paper: Rigazzi, "DC-S3GD", 2019, eq. 17.
    """
    return DCS3GD(lambda_0)


def stragglers(
    window: int = 2, consecutive: int = 2, min_gap: float = 0.2, sliding: bool = False, persistent_s: float = 100.0
) -> Stragglers:
    """Straggler detection: who falls behind is put on record.

    Paper: Li et al., "Sync-Switch", 2021, Sect. IV-B2.
    """
    return Stragglers(window, consecutive, min_gap, sliding, persistent_s)


def greedy(
    window: int = 2, consecutive: int = 2, min_gap: float = 0.2, sliding: bool = False, persistent_s: float = 100.0
) -> Greedy:
    """Greedy online policy: asynchronous while there is a straggler.

    Paper: Li et al., "Sync-Switch", 2021, Sect. IV-B2.
    """
    return Greedy(window, consecutive, min_gap, sliding, persistent_s)


def elastic(
    window: int = 2, consecutive: int = 2, min_gap: float = 0.2, sliding: bool = False, persistent_s: float = 100.0
) -> Elastic:
    """Elastic online policy: stragglers are set aside until they have recovered.

    Paper: Li et al., "Sync-Switch", 2021, Sect. IV-B2.
    """
    return Elastic(window, consecutive, min_gap, sliding, persistent_s)


def momentum(rule: str) -> Momentum:
    """Momentum after a switch: "keep", "zero", "1/n", or ramps "i/n" and "2^i/n" by epoch.

    Paper: Li et al., "Sync-Switch", 2021, Fig. 8b.
    """
    return Momentum(rule)


ADDITIONS: Mapping[str, Callable[..., Compensator | Controller[Any] | Momentum]] = {
    factory.__name__: factory
    for factory in (staleness_lr, staleness_weight, dc_asgd, dc_s3gd, stragglers, greedy, elastic, momentum)
}
"""What can stand after a plus."""


def parse_plan(text: str) -> Plan:
    """Read a plan such as ``k_sync(k=12)``, ``bsp@25% >> asp`` or ``asp + staleness_lr(C=0.01)``.

    After ``+`` stands what is done about stale gradients, stragglers or the momentum, after ``@`` the point of the run
    at which a part ends: ``25%`` of the workload, ``updates=100``, ``gradients=6400``, ``epochs=2`` or ``seconds=60``.

    >>> print(parse_plan("bsp@25% >> k_sync(k=3)@epochs=2 >> asp"))
    bsp until 0.25 of the workload >> k_sync(k=3) until 2 epochs >> asp
    """
    return Plan(tuple(_parse_phase(part) for part in split_top(text, ">>")))


def _parse_phase(text: str) -> Phase:
    call, *ends = split_top(text, "@")
    if len(ends) > 1:
        raise UsageError(f"{text!r} has two ends; expected one, as in bsp@25%")
    protocol, *additions = split_top(call, "+")
    given = bind(parse_call(protocol), CATALOGUE)
    phase = given if isinstance(given, Phase) else Phase(given)
    phase += tuple(bind(parse_call(each), ADDITIONS) for each in additions)
    return replace(phase, end=Extent.parse(ends[0])) if ends else phase
