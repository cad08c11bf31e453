"""Error-runtime trade-off: bounds on the error of protocols at given times."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline.clusters.simulated import Cluster
from paceline.errors import UsageError
from paceline.protocols.protocol import Protocol
from paceline.theory.assumptions import protocol_family
from paceline.theory.error_bounds import Constants, async_error, sync_error
from paceline.theory.runtime import Expected
from paceline.theory.simulated_runtime import expected_or_simulated
from paceline.theory.staleness import staleness
from paceline.utils.argument_types import checked_types
from paceline.utils.representation import Representation

Array = NDArray[np.float64]


@dataclass(frozen=True, repr=False)
class Tradeoff(Representation):
    """Bounds on the error of several protocols at given times.

    Attributes:
        times_s: times in seconds, >= 0 [times].
        errors: bound on the error at each time [times], by name of the protocol.
        runtimes: seconds per update, by name of the protocol; its kind is "simulated" where no expectation is known.
    """

    times_s: Array
    errors: Mapping[str, Array]
    runtimes: Mapping[str, Expected]

    def _facts(self) -> Mapping[str, object]:
        last = {name: float(errors[-1]) for name, errors in self.errors.items() if len(errors)}
        facts = {"protocols": list(self.errors), "times": len(self.times_s), "last bounds": last}
        return {**facts, "simulated times": self.simulated} if self.simulated else facts

    @property
    def simulated(self) -> list[str]:
        """Names of the protocols whose seconds per update are simulated."""
        return [name for name, runtime in self.runtimes.items() if runtime.kind == "simulated"]

    @property
    def best(self) -> list[str]:
        """Name of the protocol with the smallest bound at each time; the first one in a tie."""
        names = list(self.errors)
        return [names[which] for which in np.argmin(np.array(list(self.errors.values())), axis=0)]

    @property
    def best_k(self) -> list[int]:
        """Number of gradients per update of the best protocol at each time."""
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
    """Return the bound on the error over time for each protocol.

    A protocol makes ``T / seconds_per_update`` updates in T seconds. Where `expected` has only bounds on these seconds,
    or no theory for the times, they are the mean of a simulation. The error bound of fresh gradients is Lemma 2, that
    of stale ones Theorem 3 with p_0 from `staleness`.

    Args:
        protocols: protocols that the theory covers, with different names.
        cluster: simulated cluster of identical workers.
        constants: constants of the objective.
        eta: learning rate of all protocols, > 0.
        times_s: times in seconds, >= 0.
        gammas: gamma by name of the protocol, in [0, 1], in place of that of the constants; it falls as k grows.

    Raises:
        NoTheoryError: the theory does not cover a protocol or the cluster.
        UsageError: eta is above the largest learning rate of a protocol, two protocols have the same name, or a
            protocol has controllers or compensators, for which there is no bound.

    >>> from paceline.catalogue.protocols import asp, bsp
    >>> constants = Constants(L=1.0, c=0.5, sigma2=1.0, gamma=0.2)
    >>> both = tradeoff([bsp(), asp()], Cluster(8), constants, eta=0.1, times_s=[1.0, 1000.0])
    >>> both.best, both.best_k
    (['asp', 'bsp'], [1, 8])

    Source: Dutta et al., "Slow and Stale Gradients Can Win the Race", AISTATS 2018, Fig. 7 (K = 1 and K = P).
    """
    at_s = np.asarray(times_s, dtype=np.float64)
    if at_s.ndim != 1 or not np.all(at_s >= 0):
        raise UsageError(f"times_s={times_s}, expected a list of seconds >= 0")
    runtimes: dict[str, Expected] = {}
    errors: dict[str, Array] = {}
    for protocol in protocols:
        _check(protocol, runtimes)
        own = replace(constants, gamma=(gammas or {}).get(protocol.name, constants.gamma))
        runtimes[protocol.name] = runtime = expected_or_simulated(protocol, cluster)
        errors[protocol.name] = _error(protocol, cluster, own, eta, at_s / runtime.seconds_per_update)
    if not errors:
        raise UsageError("no protocols are given; give at least one, for example [pl.bsp(), pl.asp()]")
    return Tradeoff(at_s, errors, runtimes)


def _check(protocol: Protocol, others: Mapping[str, Expected]) -> None:
    if protocol.name in others:
        raise UsageError(f"{protocol.name} is given twice; give protocols with different names")


def _error(protocol: Protocol, cluster: Cluster, constants: Constants, eta: float, updates: Array) -> Array:
    known = protocol_family(protocol, cluster.n)
    if known.is_fresh:
        return sync_error(constants, eta, known.k, updates)
    return async_error(constants, eta, known.k, staleness(protocol, cluster).fresh_lower, updates)
