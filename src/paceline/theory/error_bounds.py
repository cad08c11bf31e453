"""Error bounds of SGD with fresh and with stale gradients, each with its theorem."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UsageError
from paceline.utils.argument_types import checked_types
from paceline.utils.validation import check_range

Array = NDArray[np.float64]
Count = TypeVar("Count", float, Array)


@checked_types
@dataclass(frozen=True, kw_only=True)
class Constants:
    """Constants of the theorems: assumptions on an objective F and its gradients, and the initial error.

    Args:
        L: Lipschitz constant of the gradient, ``||grad F(u) - grad F(w)|| <= L ||u - w||``, > 0.
        c: strong convexity, ``2 c (F(w) - F*) <= ||grad F(w)||**2``, in [0, L]; 0 if F is not strongly convex.
        sigma2: variance of the gradient of one sample at a zero gradient, >= 0. The variance of a minibatch is at most
            ``sigma2 / m + M_G / m * ||grad F||**2``.
        M_G: growth of this variance with the squared gradient, >= 0.
        m: number of samples of a minibatch, >= 1.
        initial_error: initial error ``F(w_0) - F*``, >= 0.
        gamma: error of stale gradients, ``E||grad F(w_j) - grad F(w_tau)||**2 <= gamma E||grad F(w_j)||**2``, in
            [0, 1]; 0 for fresh gradients.

    Raises:
        UsageError: a constant is out of its range, or c is above L.

    Source: Dutta et al., "Slow and Stale Gradients Can Win the Race", AISTATS 2018, Sect. 2.4 and Theorem 3.
    """

    L: float
    c: float
    sigma2: float
    M_G: float = 0.0
    m: int = 1
    initial_error: float = 1.0
    gamma: float = 0.0

    def __post_init__(self) -> None:
        check_range("(0, inf)", L=self.L)
        check_range("[0, inf)", c=self.c, sigma2=self.sigma2, M_G=self.M_G, initial_error=self.initial_error)
        check_range("[1, inf)", Integral, m=self.m)
        check_range("[0, 1]", gamma=self.gamma)
        if self.c > self.L:
            raise UsageError(f"c={self.c} is above L={self.L}, which no function satisfies; give c <= L")

    def noise(self, k: int) -> float:
        """Return the variance of the mean of k gradients at a zero gradient: ``sigma2 / (k m)``, k >= 1."""
        check_range("[1, inf)", Integral, k=k)
        return self.sigma2 / (k * self.m)

    def progress(self, p_0: float) -> float:
        """Return ``gamma' = 1 - gamma + p_0 / 2``, the progress of stale gradients relative to fresh ones.

        Args:
            p_0: lower bound on the share of fresh gradients, in [0, 1].

        Raises:
            UsageError: gamma' is 0, so that no bound exists.
        """
        check_range("[0, 1]", p_0=p_0)
        progress = 1 - self.gamma + p_0 / 2
        if progress == 0:
            raise UsageError("gamma=1 and p_0=0: such stale gradients may make no progress; give a smaller gamma")
        return progress


@checked_types
def max_learning_rate(constants: Constants, k: int = 1) -> float:
    """Return the largest learning rate of Lemma 2 and Theorems 3, 4 and 5: ``1 / (2 L (M_G / (k m) + 1))``.

    Args:
        constants: constants of the problem.
        k: number of gradients of an update, >= 1.

    >>> max_learning_rate(Constants(L=2.0, c=1.0, sigma2=1.0, M_G=4.0), k=4)
    0.125

    Source: Dutta et al., AISTATS 2018, Lemma 2, Theorems 3 and 4, Sect. 3.2.

    Differs from the paper: Theorem 3 prints ``1 / (2 L (M_G / (k m) + 1 / k))``, k times as much for M_G = 0. Its
    Lemma 9 gives the variance of a sum of k gradients as ``k sigma2 / m + sum of (M_G / m + k) ||grad F||**2`` in (36).
    Over k**2 that is a mean of ``M_G / (k m) + 1``, where (39) has 1 / k. So the bound is that of Lemma 2: the mean of
    k equal gradients is no smaller than each of them.
    Sect. 3.2 allows the *larger* of this and ``1 / (c gamma')``, but both conditions must hold. The smaller one is
    always this one, because c <= L and gamma' <= 3/2.
    """
    check_range("[1, inf)", Integral, k=k)
    return 1 / (2 * constants.L * (constants.M_G / (k * constants.m) + 1))


@checked_types
def sync_error(constants: Constants, eta: float, k: int, updates: Count) -> Count:
    """Return the bound on ``E[F(w_J)] - F*`` after J updates of k fresh gradients (K-sync, K-batch-sync, sync SGD).

    ``floor + (1 - eta c)**J (initial_error - floor)``

    Args:
        constants: constants with c > 0.
        eta: learning rate, > 0, at most `max_learning_rate`.
        k: number of gradients of an update, >= 1.
        updates: number of updates J, >= 0, or an array of numbers.

    >>> round(sync_error(Constants(L=1.0, c=1.0, sigma2=1.0), eta=0.5, k=4, updates=10), 4)
    0.0634

    Source: Dutta et al., AISTATS 2018, Lemma 2 (after Bottou, Curtis and Nocedal 2016, Theorem 4.6, which allows twice
    that learning rate). For fresh gradients, `async_error` with p_0 = 1 and gamma = 0 is also valid, and tighter.
    """
    return _decay(constants, sync_floor(constants, eta, k), eta * constants.c, updates)


@checked_types
def sync_floor(constants: Constants, eta: float, k: int) -> float:
    """Return the limit of `sync_error`: ``eta L sigma2 / (2 c k m)``.

    Args:
        constants: constants with c > 0.
        eta: learning rate, > 0, at most `max_learning_rate`.
        k: number of gradients of an update, >= 1.

    Source: Dutta et al., AISTATS 2018, Lemma 2.
    """
    _check_rate(constants, eta, k)
    return eta * constants.L * constants.noise(k) / (2 * _convexity(constants))


@checked_types
def async_error(constants: Constants, eta: float, k: int, p_0: float, updates: Count) -> Count:
    """Return the bound on ``E[F(w_J)] - F*`` after J updates of k gradients, some stale (K-async, K-batch-async).

    ``floor + (1 - eta c gamma')**J (initial_error - floor)``, ``gamma' = 1 - gamma + p_0 / 2``

    Args:
        constants: constants with c > 0, and with the gamma of this protocol.
        eta: learning rate, > 0, at most `max_learning_rate`.
        k: number of gradients of an update, >= 1.
        p_0: lower bound on the share of fresh gradients, given the past, in [0, 1]; see `staleness`.
        updates: number of updates J, >= 0, or an array of numbers.

    Source: Dutta et al., AISTATS 2018, Theorem 3 (k = 1: Corollary 2).

    Differs from the paper: the largest learning rate, see `max_learning_rate`.
    """
    return _decay(constants, async_floor(constants, eta, k, p_0), eta * constants.c * constants.progress(p_0), updates)


@checked_types
def async_floor(constants: Constants, eta: float, k: int, p_0: float) -> float:
    """Return the limit of `async_error`: ``eta L sigma2 / (2 c gamma' k m)``.

    Args:
        constants: constants with c > 0.
        eta: learning rate, > 0, at most `max_learning_rate`.
        k: number of gradients of an update, >= 1.
        p_0: lower bound on the share of fresh gradients, given the past, in [0, 1].

    Source: Dutta et al., AISTATS 2018, Theorem 3.
    """
    return sync_floor(constants, eta, k) / constants.progress(p_0)


@checked_types
def variable_rate_error(constants: Constants, etas: Sequence[float], C: float, p_0: float, k: int = 1) -> float:
    """Return the bound on ``E[F(w_J)] - F*`` after J updates with staleness learning rates eta_0 to eta_{J-1}.

    ``e_{j+1} = (1 - rho_j) e_j + Delta_j``, ``rho_j = eta_j c (1 + p_0 / 2)``, and
    ``Delta_j = C L**2 / 2 + eta_j**2 L sigma2 / (2 k m)``. The assumption on gamma is replaced by
    ``eta_j E||w_j - w_tau||**2 <= C``.

    Args:
        constants: constants with c > 0; gamma is not used.
        etas: learning rates, each > 0 and at most `max_learning_rate`, fixed in advance as the proof requires.
        C: bound on the learning rate times the squared distance, >= 0.
        p_0: lower bound on the share of fresh gradients, given the past, in [0, 1].
        k: number of gradients of an update, >= 1.

    Source: Dutta et al., AISTATS 2018, Theorem 4.

    Differs from the paper: it prints products over j = 1 ... J. Its proof (45) has 0 ... J-1 for the error after J
    updates, and each Delta_i shrinks by the later factors i+1 ... J-1 only. K > 1 is an extension by the same steps.
    """
    for eta in etas:
        _check_rate(constants, eta, k)
    check_range("[0, inf)", C=C)
    error = constants.initial_error
    for eta in etas:
        error = (1 - _decay_rate(constants, eta, p_0)) * error + _disturbance(constants, eta, C, k)
    return error


@checked_types
def variable_rate_floor(constants: Constants, eta: float, C: float, p_0: float, k: int = 1) -> float:
    """Return the limit of `variable_rate_error` for a constant rate eta: ``Delta / rho``.

    Args:
        constants: constants with c > 0.
        eta: learning rate, > 0, at most `max_learning_rate`.
        C: bound on the learning rate times the squared distance, >= 0.
        p_0: lower bound on the share of fresh gradients, given the past, in [0, 1].
        k: number of gradients of an update, >= 1.

    Source: Dutta et al., AISTATS 2018, Theorem 4.
    """
    _check_rate(constants, eta, k)
    check_range("[0, inf)", C=C)
    return _disturbance(constants, eta, C, k) / _decay_rate(constants, eta, p_0)


@checked_types
def staleness_constant(constants: Constants, eta: float, floor: float, p_0: float, k: int = 1) -> float:
    """Return the C of the staleness learning rate ``min(C / ||w_j - w_tau||**2, eta)`` for a wanted error floor.

    It solves `variable_rate_floor` for C: ``C = (2 floor eta c (1 + p_0 / 2) - eta**2 L sigma2 / (k m)) / L**2``.

    Args:
        constants: constants with c > 0.
        eta: largest learning rate, > 0, at most `max_learning_rate`.
        floor: wanted bound on the error in the long run, > 0.
        p_0: lower bound on the share of fresh gradients, given the past, in [0, 1].
        k: number of gradients of an update, >= 1.

    Raises:
        UsageError: the noise of the gradients alone leaves more than this floor at this rate.

    >>> constants = Constants(L=1.0, c=0.5, sigma2=0.1)
    >>> C = staleness_constant(constants, eta=0.1, floor=0.02, p_0=0.125)
    >>> round(C, 6), round(variable_rate_floor(constants, 0.1, C, 0.125), 6)
    (0.001125, 0.02)

    Source: own, from Theorem 4 of Dutta et al., AISTATS 2018, who choose C "of the same order as the error floor".
    """
    check_range("(0, inf)", floor=floor)
    least = variable_rate_floor(constants, eta, 0.0, p_0, k)
    if floor <= least:
        raise UsageError(
            f"floor={floor} cannot be reached at eta={eta}, where the noise alone leaves {least:.4g}; "
            "give a higher floor or a smaller eta"
        )
    return 2 * (floor - least) * _decay_rate(constants, eta, p_0) / constants.L**2


@checked_types
def mean_squared_gradient(constants: Constants, eta: float, k: int, p_0: float, updates: Count) -> Count:
    """Return the bound on the mean of ``E||grad F(w_j)||**2`` over j = 0 ... J-1, without convexity.

    ``2 initial_error / (J eta gamma') + eta L sigma2 / (k m gamma')``

    Args:
        constants: constants, of which c is not used; ``initial_error`` is relative to the infimum of F.
        eta: learning rate, > 0, at most `max_learning_rate`.
        k: number of gradients of an update, >= 1.
        p_0: lower bound on the share of fresh gradients, given the past, in [0, 1]; 1 for fresh gradients.
        updates: number of updates J, >= 1, or an array of numbers.

    Source: Dutta et al., AISTATS 2018, Theorem 5.

    Differs from the paper: it counts J + 1 updates, from w_0 to w_{J+1}; the E[F(w_J)] in its (41) is E[F(w_{J+1})].
    """
    _check_rate(constants, eta, k)
    if np.any(np.less(updates, 1)):
        raise UsageError(f"updates={updates}, expected at least 1, because the bound is a mean over updates")
    progress = constants.progress(p_0)
    floor = eta * constants.L * constants.noise(k) / progress
    return 2 * constants.initial_error / (eta * progress) / updates + floor


def _decay(constants: Constants, floor: float, rate: float, updates: Count) -> Count:
    if np.any(np.less(updates, 0)):
        raise UsageError(f"updates={updates}, expected at least 0")
    left: Count = (1 - rate) ** updates
    return floor + left * (constants.initial_error - floor)


def _decay_rate(constants: Constants, eta: float, p_0: float) -> float:
    check_range("[0, 1]", p_0=p_0)
    return eta * _convexity(constants) * (1 + p_0 / 2)


def _disturbance(constants: Constants, eta: float, C: float, k: int) -> float:
    return C * constants.L**2 / 2 + eta**2 * constants.L * constants.noise(k) / 2


def _convexity(constants: Constants) -> float:
    if constants.c == 0:
        raise UsageError(
            "c=0: there is no bound on the error of a function that is not strongly convex; "
            "give c > 0, or use mean_squared_gradient"
        )
    return constants.c


def _check_rate(constants: Constants, eta: float, k: int) -> None:
    most = max_learning_rate(constants, k)
    if not 0 < eta <= most:
        raise UsageError(f"eta={eta}, expected a learning rate above 0 and at most {most:.6g} for k={k}")
