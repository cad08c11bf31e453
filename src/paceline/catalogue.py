"""Every named protocol, with its knobs and its paper."""

from collections.abc import Callable
from math import inf
from typing import TypeVar

from paceline.errors import UsageError
from paceline.protocols import Extent, Phase, Plan, Protocol
from paceline.text import bind, parse_call, split_top

F = TypeVar("F", bound=Callable[..., Protocol])

CATALOGUE: dict[str, Callable[..., Protocol]] = {}


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


def parse_plan(text: str) -> Plan:
    """Read a plan such as ``k_sync(k=12)`` or ``bsp@25% >> asp``.

    After ``@`` stands the point of the run at which a part ends: ``25%`` of the workload, ``updates=100``,
    ``gradients=6400``, ``epochs=2`` or ``seconds=60``.

    >>> print(parse_plan("bsp@25% >> k_sync(k=3)@epochs=2 >> asp"))
    bsp until 0.25 of the workload >> k_sync(k=3) until 2 epochs >> asp
    """
    return Plan(tuple(_parse_phase(part) for part in split_top(text, ">>")))


def _parse_phase(text: str) -> Phase:
    call, *ends = split_top(text, "@")
    if len(ends) > 1:
        raise UsageError(f"{text!r} has two ends; expected one, as in bsp@25%")
    protocol = bind(parse_call(call), CATALOGUE)
    return Phase(protocol, end=Extent.parse(ends[0]) if ends else None)
