"""Named modifiers of a phase, with their knobs and papers."""

from collections.abc import Callable, Mapping
from typing import Any

from paceline.policies.compensation.base import Compensator
from paceline.policies.compensation.delay import DCASGD, DCS3GD
from paceline.policies.compensation.step_scale import StalenessLR, StalenessWeight
from paceline.policies.controllers.base import Controller
from paceline.policies.controllers.grace import Grace
from paceline.policies.controllers.restart_after import RestartAfter
from paceline.policies.controllers.straggler_policies import Elastic, Greedy, Stragglers
from paceline.protocols.local_steps import LocalSteps
from paceline.protocols.momentum import Momentum
from paceline.protocols.outer_optimizer import OuterOptimizer, parse_outer
from paceline.utils.argument_types import checked_types


@checked_types
def staleness_lr(C: float | None = None, error_floor: float | None = None) -> StalenessLR:
    """Staleness learning rate: scales a step by the squared distance that the parameters have moved since its version.

    Args:
        C: bound on the learning rate times the squared distance, > 0; give this or error_floor.
        error_floor: wanted floor of the loss above its minimum, > 0.

    Paper: Dutta et al. 2018, eq. 13.
    """
    return StalenessLR(C, error_floor)


@checked_types
def staleness_weight(weighting: str | Callable[[int], float] = "1/(1+tau)") -> StalenessWeight:
    """Staleness weight: scales a step by 1/(1+tau), 1/sqrt(1+tau) or 1/(1+sqrt(tau)) of its staleness tau.

    Args:
        weighting: "1/(1+tau)", "1/sqrt(1+tau)", "1/(1+sqrt(tau))", or a function from tau to a weight > 0.

    Paper: Zhang et al., "Staleness-aware async-SGD", 2016; Nguyen et al. (FedBuff) 2022.
    """
    return StalenessWeight(weighting)


@checked_types
def dc_asgd(lambda0: float, m: float | None = None, epsilon: float = 1e-7) -> DCASGD:
    """Delay compensation: corrects a stale gradient to first order; m makes the correction adaptive.

    Args:
        lambda0: strength of the correction, in [0, 1e30]; in the paper 0.04 if constant, 2 if adaptive.
        m: decay of the mean square, in [0, 1), 0.95 in the paper; None for a constant lambda.
        epsilon: term against division by 0, > 0.

    Paper: Zheng et al., "Asynchronous stochastic gradient descent with delay compensation", 2017.
    """
    return DCASGD(lambda0, m, epsilon)


@checked_types
def dc_s3gd(lambda0: float = 0.2) -> DCS3GD:
    """DC-S3GD correction: corrects a stale gradient to first order, by lambda0 times the length of the gradient.

    Args:
        lambda0: length of the correction relative to the gradient, in [0, 1e30]; 0.2 in the paper.

    Paper: Rigazzi, "DC-S3GD", 2019, eq. 10 and 17.
    """
    return DCS3GD(lambda0)


@checked_types
def stragglers(
    window: int = 2,
    consecutive: int = 2,
    min_gap: float = 0.2,
    sliding: bool = False,
    persistent_s: float = 100.0,
    own_past: bool = True,
) -> Stragglers:
    """Straggler detection: logs workers that fall behind.

    Args:
        window: length of a window in rounds of n arrivals, >= 1.
        consecutive: number of slow windows in a row that make a straggler, >= 1.
        min_gap: smallest relative gap to the mean throughput, in [0, 1).
        sliding: whether a window begins at every round, so that windows overlap.
        persistent_s: seconds after which a straggler is persistent, > 0; inf for never.
        own_past: whether a worker is also compared with its own past.

    Paper: Li et al., "Sync-Switch", 2021, Sect. IV-B2.
    """
    return Stragglers(
        window=window,
        consecutive=consecutive,
        min_gap=min_gap,
        sliding=sliding,
        persistent_s=persistent_s,
        own_past=own_past,
    )


@checked_types
def greedy(
    window: int = 2,
    consecutive: int = 2,
    min_gap: float = 0.2,
    sliding: bool = False,
    persistent_s: float = 100.0,
    own_past: bool = True,
) -> Greedy:
    """Greedy online policy: asynchronous while there is a straggler.

    Args:
        window: length of a window in rounds of n arrivals, >= 1.
        consecutive: number of slow windows in a row that make a straggler, >= 1.
        min_gap: smallest relative gap to the mean throughput, in [0, 1).
        sliding: whether a window begins at every round, so that windows overlap.
        persistent_s: seconds after which a straggler is persistent, > 0; inf for never.
        own_past: whether a worker is also compared with its own past.

    Paper: Li et al., "Sync-Switch", 2021, Sect. IV-B2.
    """
    return Greedy(
        window=window,
        consecutive=consecutive,
        min_gap=min_gap,
        sliding=sliding,
        persistent_s=persistent_s,
        own_past=own_past,
    )


@checked_types
def elastic(
    window: int = 2,
    consecutive: int = 2,
    min_gap: float = 0.2,
    sliding: bool = False,
    persistent_s: float = 100.0,
    own_past: bool = True,
    until_switch: bool = False,
) -> Elastic:
    """Elastic online policy: excludes stragglers until they have recovered, or until the phase ends.

    Args:
        window: length of a window in rounds of n arrivals, >= 1.
        consecutive: number of slow windows in a row that make a straggler, >= 1.
        min_gap: smallest relative gap to the mean throughput, in [0, 1).
        sliding: whether a window begins at every round, so that windows overlap.
        persistent_s: seconds after which a straggler is persistent, > 0; inf for never.
        own_past: whether a worker is also compared with its own past.
        until_switch: whether every straggler is excluded until the phase ends, as in the paper.

    Paper: Li et al., "Sync-Switch", 2021, Sect. IV-B2.
    """
    return Elastic(
        window=window,
        consecutive=consecutive,
        min_gap=min_gap,
        sliding=sliding,
        persistent_s=persistent_s,
        own_past=own_past,
        until_switch=until_switch,
    )


@checked_types
def grace(seconds: float) -> Grace:
    """Grace period: an update waits this long after its quorum for gradients that are about to come.

    Args:
        seconds: time from the k-th gradient to the update, > 0.

    Paper: none; Decoupled DiLoCo, 2026, has a quorum with a grace window.
    """
    return Grace(seconds)


@checked_types
def restart_after(seconds: float) -> RestartAfter:
    """Restart of long draws: work that is not done after this time is cancelled and begun anew.

    Args:
        seconds: time after which a draw is begun anew, > 0.

    Paper: Maranjyan et al., "MindFlayer", 2024.
    """
    return RestartAfter(seconds)


@checked_types
def local_steps(
    H: int | None = None, seconds: float | None = None, outer: str | OuterOptimizer | None = None
) -> LocalSteps:
    """Local steps: each worker hands in the change that several steps of its own optimizer make.

    Args:
        H: number of steps, >= 1; with seconds, the largest number.
        seconds: time for the steps, > 0; a worker takes as many as fit, and at least one.
        outer: outer optimizer of the server, as "nesterov(lr=0.7, momentum=0.9)" of DiLoCo, or "sgd(lr=1)"; the mean
            of the workers' parameters if not given.

    Paper: Stich, "Local SGD", 2019; Douillard et al., "DiLoCo", 2023; Ferdinand et al., "Anytime minibatch", 2019.
    """
    return LocalSteps(H, seconds, parse_outer(outer) if isinstance(outer, str) else outer)


@checked_types
def momentum(rule: str) -> Momentum:
    """Momentum after a switch: "keep", "zero", "1/n", or ramps "i/n" and "2^i/n" by epoch.

    Args:
        rule: "keep" (no limit), "zero", "1/n", "i/n" or "2^i/n", with i the epochs since the phase began.

    Paper: Li et al., "Sync-Switch", 2021, Fig. 8b.
    """
    return Momentum(rule)


ADDITIONS: Mapping[str, Callable[..., Compensator | Controller[Any] | Momentum | LocalSteps]] = {
    "staleness_lr": staleness_lr,
    "staleness_weight": staleness_weight,
    "dc_asgd": dc_asgd,
    "dc_s3gd": dc_s3gd,
    "stragglers": stragglers,
    "greedy": greedy,
    "elastic": elastic,
    "grace": grace,
    "restart_after": restart_after,
    "momentum": momentum,
    "local_steps": local_steps,
}
"""Factories of the modifiers that a plus can add."""
