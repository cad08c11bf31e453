"""Every named protocol, with its knobs and its paper."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from math import inf
from typing import Any, Literal, TypeVar

from paceline.catalogue.serverless import SERVERLESS
from paceline.errors import UsageError, did_you_mean
from paceline.policies.controllers.adasync import AdaSync
from paceline.policies.controllers.auto import Auto
from paceline.policies.controllers.balance import Balance
from paceline.policies.controllers.base import Controller
from paceline.policies.controllers.dbw import BDBW, DBW
from paceline.policies.controllers.dynamic_lead import DynamicLead
from paceline.policies.controllers.idle_workers import IdleWorkers
from paceline.policies.controllers.patient import Patient
from paceline.policies.estimators.dbw.update_time import Unobserved
from paceline.protocols.additions import ControllerPart
from paceline.protocols.protocol import Phase, Protocol
from paceline.utils.argument_types import checked_types
from paceline.utils.spec_parser import bind, parse_call

F = TypeVar("F", bound=Callable[..., Protocol | Phase])

CATALOGUE: dict[str, Callable[..., Protocol | Phase]] = {}


def named(factory: F) -> F:
    """Check the types of a factory's arguments, and list it in the catalogue under its name."""
    CATALOGUE[factory.__name__] = checked = checked_types(factory)
    return checked


@named
def bsp() -> Protocol:
    """Bulk synchronous parallel: every update waits for one gradient of every live worker.

    Paper: Valiant, "A bridging model for parallel computation", 1990.
    """
    return Protocol(quorum="all", max_staleness=0, refill="update", name="bsp")


@named
def balanced(
    m: int = 8,
    backups: bool = True,
    leases: Literal["queue"] | int = "queue",
    max_share: float = 1.5,
    batch: Literal["start", "live"] = "start",
) -> Phase:
    """Balanced shares: the updates of BSP, of which each worker computes as many samples as its speed allows.

    An update has the samples of a minibatch of every worker, each used once, so the parameters are those of BSP. The
    first lease of a worker has its share by the times of earlier updates, less a part that follows their noise; this
    part is a queue of microbatches, of which a worker takes one at a time, or more where each lease has a cost.

    Args:
        m: number of microbatches of a minibatch, >= 1.
        backups: whether a worker that finds the queue empty repeats a lease of another one; the first copy counts.
        leases: "queue", or 1 for one share of each worker in an update, which changes only for a gain above the noise.
        max_share: largest lease as a multiple of a minibatch, >= 1.
        batch: whether an update of a queue has a minibatch of each worker at the "start", or of each "live" one.

    Paper: Chen et al., "Semi-dynamic load balancing" (LB-BSP), 2020, has one share each; Polychronopoulos and Kuck,
    "Guided self-scheduling", 1987; Dean and Ghemawat, "MapReduce", 2004, for backups.
    """
    has_queue = leases == "queue"
    told = f"balanced(m={m}"
    told += "" if backups or not has_queue else ", backups=false"
    told += "" if has_queue else ", leases=1"
    told += f", max_share={max_share:g}" if max_share != 1.5 else ""
    told += f", batch={batch!r}" if batch != "start" and has_queue else ""
    name = f"{told})"
    if not has_queue and leases != 1:
        raise UsageError(f"balanced(m={m}, leases={leases!r}): expected leases='queue' or 1; type {name}")
    if not has_queue and batch != "start":
        raise UsageError(f"balanced(m={m}, leases=1, batch={batch!r}): one share each is of live workers; type {name}")
    balance = Balance(m, max_share, queue=has_queue, repeats=backups, live=batch == "live")
    protocol = replace(bsp(), refill="share" if has_queue else "update", name=name)
    return Phase(protocol, controllers=(balance,), name=name)


@named
def backup(k: int) -> Protocol:
    """Backup workers, Push & Wait: the k fastest make the update, the others finish and are dropped.

    Args:
        k: number of gradients of an update, from 1 to the number of workers.

    Paper: Chen et al., "Revisiting distributed synchronous SGD", 2016; Xu et al. (DBW) 2020, Sect. 2.
    """
    return Protocol(quorum=k, max_staleness=0, refill="update", name=f"backup(k={k})")


@named
def k_sync(k: int) -> Protocol:
    """K-sync, or backup workers, Push & Interrupt: the k fastest make the update, the others restart.

    Args:
        k: number of gradients of an update, from 1 to the number of workers.

    Paper: Dutta et al., "Slow and stale gradients can win the race", 2018.
    """
    return Protocol(quorum=k, max_staleness=0, refill="update", on_update="interrupt", name=f"k_sync(k={k})")


@named
def pull(k: int) -> Protocol:
    """Backup workers, Pull, or Rennala SGD: the first k fresh gradients, of any worker.

    Args:
        k: number of gradients of an update, >= 1.

    Paper: Xu et al. (DBW) 2020, Sect. 2; Tyurin and Richtarik, "Optimal time complexities", 2023.
    """
    return Protocol(quorum=k, max_staleness=0, refill="arrival", name=f"pull(k={k})")


@named
def k_batch_sync(k: int) -> Protocol:
    """K-batch-sync: as `pull`, but work that has become stale is interrupted.

    Args:
        k: number of gradients of an update, >= 1.

    Paper: Dutta et al. 2018.
    """
    return Protocol(quorum=k, max_staleness=0, refill="arrival", on_update="interrupt", name=f"k_batch_sync(k={k})")


@named
def k_async(k: int) -> Protocol:
    """K-async: k gradients of different workers, however stale.

    Args:
        k: number of gradients of an update, from 1 to the number of workers.

    Paper: Dutta et al. 2018.
    """
    return Protocol(quorum=k, max_staleness=inf, refill="update", name=f"k_async(k={k})")


@named
def k_batch_async(k: int) -> Protocol:
    """K-batch-async, or FedBuff: any k gradients, however stale; no worker ever waits.

    Args:
        k: number of gradients of an update, >= 1.

    Paper: Dutta et al. 2018; Nguyen et al., "Federated learning with buffered asynchronous aggregation", 2022.
    """
    return Protocol(quorum=k, max_staleness=inf, refill="arrival", name=f"k_batch_async(k={k})")


@named
def asp() -> Protocol:
    """Asynchronous parallel: every gradient is an update.

    Paper: Dean et al., "Large scale distributed deep networks", 2012.
    """
    return Protocol(quorum=1, max_staleness=inf, refill="arrival", name="asp")


@named
def ssp(lead: int) -> Protocol:
    """Stale synchronous parallel: asynchronous, but no worker is more than lead gradients ahead.

    Args:
        lead: number of gradients by which a worker may be ahead of the slowest live one when it starts, >= 0.

    Paper: Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", 2013.
    """
    name = f"ssp(lead={lead})"
    if lead < 0:
        raise UsageError(f"{name}: lead = {lead!r}, expected a whole number >= 0")
    return Protocol(quorum=1, max_staleness=inf, refill="arrival", max_lead=lead, name=name)


@named
def dssp(lead: int, most: int) -> Phase:
    """Dynamic SSP: a lead between two bounds, at which the fastest worker waits least for the slowest.

    Args:
        lead: number of gradients by which every worker may be ahead, >= 0, as in `ssp`.
        most: largest such number, >= lead.

    Paper: Zhao et al., "Dynamic stale synchronous parallel distributed training for deep learning", 2019.
    """
    name = f"dssp(lead={lead}, most={most})"
    return Phase(replace(ssp(lead), name=name), controllers=(DynamicLead(lead, most),), name=name)


@named
def ringmaster(r: int, stops: bool = False) -> Protocol:
    """Ringmaster ASGD: asynchronous, gradients r or more versions old are dropped, or interrupted.

    Args:
        r: staleness in versions from which on a gradient is dropped, >= 1.
        stops: whether work that would be dropped is interrupted.

    Paper: Maranjyan, Tyurin and Richtarik, "Ringmaster ASGD", 2025.
    """
    name = f"ringmaster(r={r}, stops=true)" if stops else f"ringmaster(r={r})"
    if not isinstance(r, int) or r < 1:
        raise UsageError(f"{name}: r = {r!r}, expected a whole number >= 1")
    return Protocol(
        quorum=1, max_staleness=r - 1, refill="arrival", on_update="interrupt" if stops else "finish", name=name
    )


@named
def auto(
    candidates: Sequence[str | Protocol | Phase] = (),
    price_of_switch_s: float = 0.0,
    m: int | None = None,
    fresh: bool = False,
) -> Phase:
    """Automatic protocol and learning rate: the protocol with the most progress per second, from the rate of BSP.

    Without candidates the run begins with balanced(m), and else with the first one.

    Args:
        candidates: protocols to choose from, as ["bsp", "asp"]; balanced(m), bsp, asp and five families if none is
            given.
        price_of_switch_s: seconds of training that a change of the protocol costs, >= 0.
        m: number of microbatches of a minibatch in balanced updates, 8 if not given; 0 for whole minibatches. Only
            without candidates.
        fresh: whether protocols with stale gradients are left out, as without a server. Only without candidates.

    Paper: none; after the learning rate of McCandlish et al., "An empirical model of large-batch training", 2018.
    """
    chosen = [_candidate(each) for each in candidates]
    if chosen and m is not None:
        raise UsageError(f"auto: m={m} with candidates; name balanced(m={m or 8}) among the candidates, or leave m out")
    if chosen and fresh:
        raise UsageError(
            "auto: fresh=True with candidates; name the fresh ones among the candidates, or leave fresh out"
        )
    queues = [each for one in chosen for each in one.controllers if isinstance(each, Balance)]
    if not chosen and m != 0:
        queues = [Balance(8 if m is None else m, queue=True)]
    told = [f"candidates=[{', '.join(repr(each.title) for each in chosen)}]"] if chosen else []
    told += [f"price_of_switch_s={price_of_switch_s:g}"] if price_of_switch_s else []
    told += [f"m={m}"] if m not in (None, 8) else []
    told += ["fresh=true"] if fresh else []
    name = f"auto({', '.join(told)})" if told else "auto"
    if len(queues) > 1:
        raise UsageError(f"{name}: a run has one queue of leases; name one balanced protocol")
    pieces = queues[0].pieces if queues else 0
    begun = replace(bsp(), refill="share" if queues else "update", name=name)
    controller = Auto(tuple(each.protocol for each in chosen), price_of_switch_s, m=pieces, fresh=fresh)
    return Phase(begun, controllers=(controller, *queues), name=name)


def _candidate(given: str | Protocol | Phase) -> Phase:
    """Return a candidate of `auto`: a protocol with constant knobs, or balanced with a queue."""
    parsed = bind(parse_call(given), CATALOGUE) if isinstance(given, str) else given
    if isinstance(parsed, Protocol):
        return Phase(parsed)
    if isinstance(parsed, Phase) and parsed == Phase(
        parsed.protocol, controllers=tuple(filter(_is_queue, parsed.controllers)), name=parsed.name
    ):
        return parsed
    raise UsageError(
        f"auto: {given} is no protocol with constant knobs; give for example 'k_sync(k=4)' or 'balanced(m=8)'"
    )


def _is_queue(controller: ControllerPart) -> bool:
    return isinstance(controller, Balance) and controller.queue


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
    pooled: bool = True,
) -> Phase:
    """Dynamic backup workers: chooses k for every update so that the loss falls fastest.

    Args:
        base: protocol whose quorum is controlled: "backup", "k_sync", "pull", "k_batch_sync", "k_async" or
            "k_batch_async".
        D: number of updates over which the means of the gain are taken, >= 1.
        beta: ratio of two losses above which the loss has risen, >= 1.
        no_gain: quorum if no k has a positive gain: "all" workers, or "keep" the k before.
        unobserved: end of the interval of a time without samples that is taken: "lower", "mid" or "upper".
        window: number of latest updates whose times count, >= 1; None for all.
        forgetting: factor on the weight of a time at each further update, in (0, 1].
        late: whether the times of gradients that arrived too late to be used count.
        release_idle: whether a worker whose gradients are never used is excluded, as with `IdleWorkers`.
        pooled: whether all samples of a time count together where every update restarts all workers, as under k_sync.

    Paper: Xu, Neglia, Sebastianelli, "Dynamic backup workers for parallel machine learning", 2020.
    """
    given = locals()  # before other names are bound
    controller = DBW(
        D=D,
        beta=beta,
        no_gain=no_gain,
        unobserved=unobserved,
        window=window,
        forgetting=forgetting,
        late=late,
        pooled=pooled,
    )
    return _controlled(dbw, given, "all", controller, IdleWorkers(release=release_idle))


@named
def b_dbw(
    base: str = "backup",
    unobserved: Unobserved = "lower",
    window: int | None = None,
    forgetting: float = 1.0,
    late: bool = True,
    release_idle: bool = False,
    pooled: bool = True,
) -> Phase:
    """Blind DBW: chooses k for the most gradients per second, regardless of the loss.

    Args:
        base: protocol whose quorum is controlled: "backup", "k_sync", "pull", "k_batch_sync", "k_async" or
            "k_batch_async".
        unobserved: end of the interval of a time without samples that is taken: "lower", "mid" or "upper".
        window: number of latest updates whose times count, >= 1; None for all.
        forgetting: factor on the weight of a time at each further update, in (0, 1].
        late: whether the times of gradients that arrived too late to be used count.
        release_idle: whether a worker whose gradients are never used is excluded, as with `IdleWorkers`.
        pooled: whether all samples of a time count together where every update restarts all workers, as under k_sync.

    Paper: Teng and Wood, "Bayesian distributed stochastic gradient descent", 2018; Xu et al. (DBW) 2020, Sect. 4.
    """
    given = locals()  # before other names are bound
    controller = BDBW(unobserved=unobserved, window=window, forgetting=forgetting, late=late, pooled=pooled)
    return _controlled(b_dbw, given, "all", controller, IdleWorkers(release=release_idle))


@named
def adasync(base: str = "k_sync", K_0: int = 1, D: int = 5) -> Phase:
    """AdaSync: waits for more gradients per update as the loss falls.

    Args:
        base: protocol whose quorum is controlled: "backup", "k_sync", "pull", "k_batch_sync", "k_async" or
            "k_batch_async".
        K_0: quorum of the first update, >= 1; below the number of workers for k_sync and k_async.
        D: number of updates over which the loss is averaged, >= 1.

    Paper: Dutta, Wang, Joshi, "Slow and stale gradients can win the race", 2020 (arXiv:2003.10579).
    """
    return _controlled(adasync, locals(), K_0, AdaSync(K_0, D))


@named
def patient(base: str = "k_sync") -> Phase:
    """Patient quorum: closes each update when no further wait raises the progress per second.

    Args:
        base: protocol whose quorum is controlled: "k_sync", "backup", "pull" or "k_batch_sync".

    Paper: none; as optimal stopping Charnov, "Optimal foraging, the marginal value theorem", 1976.
    """
    if base not in FRESH:
        raise UsageError(f"patient: base = {base!r} is no protocol with k fresh gradients{did_you_mean(base, FRESH)}")
    return _controlled(patient, {"base": base}, "all", Patient())


CATALOGUE |= SERVERLESS

FRESH = ("backup", "k_sync", "pull", "k_batch_sync")
CONTROLLED = (*FRESH, "k_async", "k_batch_async")


def _controlled(
    factory: Callable[..., Phase],
    given: Mapping[str, Any],
    quorum: int | Literal["all"],
    *controllers: Controller[Any],
) -> Phase:
    """Return the phase of a base protocol with a controlled quorum, named as on the command line."""
    name, base = factory.__name__, given["base"]
    if base not in CONTROLLED:
        raise UsageError(f"{name}: base = {base!r} is no protocol with a quorum k{did_you_mean(str(base), CONTROLLED)}")
    defaults = signature(factory).parameters
    told = [f"{knob}={str(v).lower()}" for knob, v in given.items() if v != defaults[knob].default]
    name = f"{name}({', '.join(told)})" if told else name
    protocol = CATALOGUE[base](k=1)
    assert isinstance(protocol, Protocol)
    return Phase(replace(protocol, quorum=quorum, name=name), controllers=controllers, name=name)
