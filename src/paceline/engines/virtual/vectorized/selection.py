"""Selection of a vectorized simulation for a plan and a cluster."""

from __future__ import annotations

from math import inf

from paceline.clusters.simulated import Cluster
from paceline.clusters.timing.trace import Trace
from paceline.engines.virtual.vectorized.lockstep import Lockstep
from paceline.engines.virtual.vectorized.renewal import Renewal
from paceline.engines.virtual.vectorized.rounds import Rounds
from paceline.engines.virtual.vectorized.shares import SharedRounds
from paceline.policies.controllers.balance import Balance
from paceline.protocols.protocol import Plan

ProtocolSimulation = Lockstep | Renewal | Rounds
VectorizedSimulation = ProtocolSimulation | SharedRounds

# Below these the coordinator is as fast, by measurement (exponential times; processor seconds per update).
RENEWAL_WORKERS = 16
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
        return SharedRounds(balance, cluster, seed, payload_bytes)
    kind = _kind(plan, cluster)
    return kind(plan.phases[0].protocol, cluster, seed, payload_bytes) if _gains(kind, plan, cluster) else None


def is_exact(plan: Plan, cluster: Cluster) -> bool:
    """Return whether a vectorized simulation makes the same updates as the coordinator.

    It does for one protocol without controllers but `Balance` of one share each, local steps or a bound on the lead, on
    workers that are never lost, with times independent of the virtual time. Server time per gradient, traces, slowdowns
    and faults need the coordinator.
    """
    [first, *others] = plan.phases
    has_shares = [type(each) for each in first.controllers] == [Balance] and first.protocol.refill == "update"
    is_controlled = bool(first.controllers) and not has_shares
    is_plain = not (others or is_controlled or first.allreduce or first.local_steps)
    is_fixed = is_plain and first.protocol.max_lead == inf
    is_steady = not (cluster.slowdowns or cluster.transient or cluster.faults or isinstance(cluster.timing, Trace))
    return is_fixed and is_steady and cluster.server.gradient_s == 0


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
