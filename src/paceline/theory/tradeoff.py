"""Error against time: what a protocol loses by staleness and noise, against what it gains by not waiting."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline.clusters.simulated import Cluster
from paceline.errors import UsageError
from paceline.protocols.protocol import Protocol
from paceline.theory.assumptions import recognise
from paceline.theory.error_bounds import Constants, async_error, sync_error
from paceline.theory.runtime import Expected, expected
from paceline.theory.staleness import staleness
from paceline.utils.argument_types import checked_types
from paceline.utils.representation import Representation

Array = NDArray[np.float64]


@dataclass(frozen=True, repr=False)
class Tradeoff(Representation):
    """Bounds on the error of some protocols at some times.

    Attributes:
        times_s: seconds, [times].
        errors: bound on the error of each protocol at each time, by its name, [times].
        runtimes: seconds per update of each, by its name.
    """

    times_s: Array
    errors: Mapping[str, Array]
    runtimes: Mapping[str, Expected]

    def _facts(self) -> Mapping[str, object]:
        last = {name: float(errors[-1]) for name, errors in self.errors.items() if len(errors)}
        return {"protocols": list(self.errors), "times": len(self.times_s), "last bounds": last}

    @property
    def best(self) -> list[str]:
        """The protocol with the smallest bound at each time; the first of equal ones."""
        names = list(self.errors)
        return [names[which] for which in np.argmin(np.array(list(self.errors.values())), axis=0)]

    @property
    def best_k(self) -> list[int]:
        """The number of gradients of an update that is best at each time, among these protocols."""
        return [self.runtimes[name].k for name in self.best]


@checked_types(protocols=" alone such as pl.asp(): no other bounds are known")
def tradeoff(
    protocols: Iterable[Protocol],
    cluster: Cluster,
    constants: Constants,
    eta: float,
    times_s: Sequence[float] | Array,
    gammas: Mapping[str, float] | None = None,
) -> Tradeoff:
    """Return the bound on the error against time for each protocol.

    In T seconds there are ``T / seconds_per_update`` updates, of expected seconds or, failing that, their upper bound.
    Lemma 2 gives the error of fresh gradients, Theorem 3 that of stale ones, with p_0 from `staleness`.

    Args:
        protocols: with theory, each of another name.
        cluster: simulated, of alike workers.
        constants: of the objective.
        eta: learning rate, the same for all.
        times_s: seconds, >= 0.
        gammas: gamma of a protocol by its name, where it is not that of the constants: it falls as k grows.

    Raises:
        NoTheoryError: a protocol or the cluster has none; a simulation is offered.
        UsageError: eta is above the largest allowed rate of a protocol, two protocols have one name, or one is a phase
            or a plan, whose controllers and compensators the bounds know nothing of.

    >>> from paceline.catalogue.protocols import asp, bsp
    >>> constants = Constants(L=1.0, c=0.5, sigma2=1.0, gamma=0.2)
    >>> both = tradeoff([bsp(), asp()], Cluster(8), constants, eta=0.1, times_s=[1.0, 1000.0])
    >>> both.best, both.best_k
    (['asp', 'bsp'], [1, 8])

    Source: Dutta et al., "Slow and Stale Gradients Can Win the Race", AISTATS 2018, Fig. 7 (K = 1 and K = P).
    """
    at_s = np.asarray(times_s, dtype=np.float64)
    if at_s.ndim != 1 or not np.all(at_s >= 0):
        raise UsageError(f"times_s = {times_s}, expected a list of seconds >= 0")
    runtimes: dict[str, Expected] = {}
    errors: dict[str, Array] = {}
    for protocol in protocols:
        _check(protocol, runtimes)
        own = replace(constants, gamma=(gammas or {}).get(protocol.name, constants.gamma))
        runtimes[protocol.name] = runtime = expected(protocol, cluster)
        errors[protocol.name] = _error(protocol, cluster, own, eta, at_s / runtime.seconds_per_update)
    if not errors:
        raise UsageError("no protocols are given; expected at least one, as [pl.bsp(), pl.asp()]")
    return Tradeoff(at_s, errors, runtimes)


def _check(protocol: Protocol, others: Mapping[str, Expected]) -> None:
    if protocol.name in others:
        raise UsageError(f"{protocol.name} is given twice; expected protocols of different names")


def _error(protocol: Protocol, cluster: Cluster, constants: Constants, eta: float, updates: Array) -> Array:
    known = recognise(protocol, cluster.n)
    if known.is_fresh:
        return sync_error(constants, eta, known.k, updates)
    return async_error(constants, eta, known.k, staleness(protocol, cluster).fresh_lower, updates)
