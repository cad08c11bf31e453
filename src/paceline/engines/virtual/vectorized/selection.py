"""Selection of a vectorized simulation for a plan and a cluster."""

from __future__ import annotations

from functools import cache
from math import inf
from typing import TYPE_CHECKING, TypeAlias

from paceline.clusters.simulated import Cluster
from paceline.clusters.timing.trace import Trace
from paceline.engines.virtual.vectorized.lockstep import Lockstep
from paceline.engines.virtual.vectorized.renewal import Renewal
from paceline.engines.virtual.vectorized.rounds import Rounds
from paceline.engines.virtual.vectorized.shares import SharedRounds
from paceline.policies.controllers.balance import Balance
from paceline.protocols.protocol import Plan

if TYPE_CHECKING:
    from paceline.engines.virtual.vectorized.leases import QueuedLeases

ProtocolSimulation = Lockstep | Renewal | Rounds
VectorizedSimulation: TypeAlias = "ProtocolSimulation | SharedRounds | QueuedLeases"

# Below these the coordinator is as fast, by measurement (exponential times; processor seconds per update).
RENEWAL_WORKERS = 16
QUEUE_WORKERS = 512  # with fewer the loops take longer to load
ROUND_TASKS = 32
ROUND_TASKS_PER_WORKER = 1 / 128


def vectorized_simulation(
    plan: Plan, cluster: Cluster, *, seed: int = 0, payload_bytes: float = 0
) -> VectorizedSimulation | None:
    """Return a vectorized simulation if there is one that is faster than the coordinator, or None.

    Args:
        plan: checked plan.
        cluster: simulated cluster.
        seed: seed of the run, >= 0.
        payload_bytes: bytes of the parameters, and of a gradient, >= 0.
    """
    if not is_exact(plan, cluster):
        return None
    [phase] = plan.phases
    if phase.controllers:
        [balance] = phase.controllers
        assert isinstance(balance, Balance)
        if not balance.queue:
            return SharedRounds(balance, cluster, seed, payload_bytes)
        queued = _queued_leases() if cluster.n >= QUEUE_WORKERS else None
        return None if queued is None else queued(balance, cluster, seed, payload_bytes)
    kind = _kind(plan, cluster)
    return kind(plan.phases[0].protocol, cluster, seed, payload_bytes) if _gains(kind, plan, cluster) else None


def is_exact(plan: Plan, cluster: Cluster) -> bool:
    """Return whether a vectorized simulation makes the same updates as the coordinator.

    It does for one protocol without controllers but `Balance`, local steps or a bound on the lead, on workers that are
    never lost, with times independent of the virtual time. Server time per gradient, traces, slowdowns, faults, and
    leases from a queue with times of their own need the coordinator.
    """
    [first, *others] = plan.phases
    has_shares = [type(each) for each in first.controllers] == [Balance]
    has_own_times = first.protocol.refill == "share" and cluster.leases.is_independent
    is_controlled = (bool(first.controllers) and not has_shares) or has_own_times
    is_plain = not (others or is_controlled or first.allreduce or first.local_steps)
    is_fixed = is_plain and first.protocol.max_lead == inf
    is_steady = not (cluster.slowdowns or cluster.transient or cluster.faults or isinstance(cluster.timing, Trace))
    return is_fixed and is_steady and cluster.server.gradient_s == 0


@cache
def _queued_leases() -> type[QueuedLeases] | None:
    """Return the simulation of a queue, which needs numba; None without it."""
    try:
        from paceline.engines.virtual.vectorized.leases import QueuedLeases
    except ImportError:
        return None
    return QueuedLeases


def _kind(plan: Plan, cluster: Cluster) -> type[ProtocolSimulation]:
    protocol = plan.phases[0].protocol
    if Lockstep.takes(protocol, cluster):
        return Lockstep
    return Renewal if Renewal.takes(protocol, cluster) else Rounds


def _gains(kind: type[ProtocolSimulation], plan: Plan, cluster: Cluster) -> bool:
    """Return whether the coordinator would be slower: its cost is per task, that of a round also per worker."""
    if kind is Lockstep:
        return True
    n, protocol = cluster.n, plan.phases[0].protocol
    if kind is Renewal:
        return n >= RENEWAL_WORKERS
    all_begin_anew = protocol.max_staleness == 0 and protocol.on_update == "interrupt"
    work = n if all_begin_anew or protocol.quorum == "all" else protocol.quorum
    return work >= ROUND_TASKS + ROUND_TASKS_PER_WORKER * n
