"""Checks of a plan: workers, ends of its phases, and parts that contradict each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf

from paceline.core.duration import Unit
from paceline.errors import UsageError
from paceline.protocols.momentum import KEEP
from paceline.protocols.protocol import Phase, Plan


def checked_plan(
    plan: Plan,
    n: int,
    total: float | None,
    per_epoch: float | None,
    updates: float | None = None,
    seconds: float | None = None,
) -> Plan:
    """Return a plan with workload in gradients, and check that n workers can run it.

    Args:
        plan: plan as it was written.
        n: number of workers, >= 1.
        total: gradients of the whole run; None if its stop does not fix them.
        per_epoch: gradients of one epoch; None if the data have no length.
        updates: updates of the whole run; None if its stop does not limit them.
        seconds: seconds of the whole run; None if its stop does not limit them.
    """
    if plan.found_for is not None:
        plan.found_for.check(workers=n)
    phases = []
    for phase in plan.phases:
        for controller in phase.controllers:
            controller.check(phase.protocol, n)
        phase.protocol.check_workers(n)
        _check_serverless(phase, len(plan.phases))
        _check_compensators(phase)
        _check_local_steps(phase, plan.phases[0])
        if phase.momentum.counts_epochs and per_epoch is None:
            raise UsageError(f"{phase}: these data have no epochs to raise the momentum by; give another rule")
        end = phase.end and phase.end.in_gradients(total, per_epoch)
        phases.append(replace(phase, end=end))
    _check_ends(plan.phases)
    _check_ends(phases)
    _check_reach(phases, {"gradients": total, "updates": updates, "seconds": seconds})
    return replace(plan, phases=tuple(phases))


def _check_ends(phases: Sequence[Phase]) -> None:
    """Check that every phase but the last one ends, each later than the one before."""
    *firsts, last = phases
    for phase, follower in zip(firsts, phases[1:], strict=True):
        if phase.end is None:
            raise UsageError(
                f"{phase} has no end, so {follower.protocol.name} is never reached; "
                f"end it, as in {phase.protocol.name}@25% or .until(0.25)"
            )
    if last.end is not None:
        raise UsageError(f"{last}: the last part of a plan runs to the end of the run; leave its end out")
    reached: dict[Unit, Phase] = {}
    for phase in firsts:
        assert phase.end is not None
        before = reached.get(phase.end.unit)
        if before is not None and before.end is not None and phase.end.amount <= before.end.amount:
            raise UsageError(
                f"the parts overlap: {before} is followed by {phase}; "
                "ends count from the beginning of the run and must grow"
            )
        reached[phase.end.unit] = phase


def _check_reach(phases: Sequence[Phase], limits: Mapping[Unit, float | None]) -> None:
    """Check that no phase ends where the whole run does, as far as that is known.

    An update is made of at least one gradient, so a run has at most as many updates as gradients.
    """
    for phase, follower in pairwise(phases):
        assert phase.end is not None
        units: tuple[Unit, ...] = ("updates", "gradients") if phase.end.unit == "updates" else (phase.end.unit,)
        limit, unit = min((limits[unit] or inf, unit) for unit in units)
        if phase.end.amount >= limit:
            raise UsageError(
                f"{phase}, but the run stops at {limit:.12g} {unit}, so {follower.protocol.name} is never "
                "reached; end the part earlier, or move the stop further away"
            )


def _check_compensators(phase: Phase) -> None:
    """Check that a phase has stale gradients to compensate, which no controller needs as they were measured."""
    if not phase.compensators:
        return
    if phase.protocol.max_staleness == 0 and all(controller.sets_shares for controller in phase.controllers):
        raise UsageError(
            f"{phase}: no gradient of {phase.protocol.name} is ever stale, so there is nothing to compensate; "
            "leave the compensator out, or take a protocol such as asp"
        )
    for controller in phase.controllers:
        if controller.reads == "steps":
            raise UsageError(
                f"{phase}: {type(controller).__name__} estimates from the gradients as their workers measured them, "
                "and a compensator changes them; leave one of the two out"
            )


def _check_serverless(phase: Phase, phases: int) -> None:
    """Check that a phase without a server is the only one, with nothing added at a server."""
    if phase.allreduce is None:
        return
    if phases > 1:
        raise UsageError(
            f"{phase.title} has no server, and the other parts of this plan need one; type {phase.title} alone, or "
            "bsp in its place"
        )
    if phase.local_steps is not None:
        raise UsageError(
            f"{phase}: {phase.protocol.name} has no server, to which workers could hand in local steps; type "
            f"local_sgd(H={phase.local_steps.H or 16}) alone, or add {phase.local_steps} to bsp"
        )
    if phase.controllers or phase.compensators or phase.momentum != KEEP:
        raise UsageError(
            f"{phase}: {phase.protocol.name} has no server, at which something could be added; type "
            f"{phase.protocol.name} alone (dc_s3gd is s3gd with its correction), or add to bsp or asp"
        )


def _check_local_steps(phase: Phase, first: Phase) -> None:
    """Check that all phases have the same local steps, which its compensators and controllers allow."""
    if phase.local_steps != first.local_steps:
        raise UsageError(
            f"{phase}: all parts of a plan have the same local steps, but {first} has "
            f"{first.local_steps or 'none'}; add {first.local_steps or phase.local_steps} to every part, or to none"
        )
    if phase.local_steps is None:
        return
    for compensator in phase.compensators:
        if compensator.kind == "correction":
            raise UsageError(
                f"{phase}: {compensator} approximates curvature by the square of a gradient, and a worker with local "
                "steps hands in the sum of its steps; type staleness_weight() in its place, or leave it out"
            )
    for controller in phase.controllers:
        if controller.sets_shares:
            raise UsageError(
                f"{phase}: {controller} cuts minibatches into shares, and a local step takes a whole one; type "
                f"bsp + {phase.local_steps}"
            )
        if controller.reads == "noise":
            raise UsageError(
                f"{phase}: {controller} sets the learning rate from the variance of gradients, and a worker with local "
                "steps hands in the sum of its steps; take a protocol such as k_sync(k=6)"
            )
