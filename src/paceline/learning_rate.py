"""How the learning rate follows the number of gradients in an update."""

from dataclasses import dataclass

from paceline.errors import UsageError


@dataclass(frozen=True)
class LearningRate:
    """Factor on the optimizer's own rate for an update of k gradients, with n live workers.

    eta(k) = eta_max ("constant") or eta_max * k / n ("proportional"), where eta_max is the optimizer's own
    rate ("total") or n times it ("per_worker").

    Args:
        rule: "constant" or "proportional".
        lr_is: "total" or "per_worker".

    Example:
        >>> LearningRate("proportional").scale(k=4, n=16)
        0.25
        >>> LearningRate("proportional", "per_worker").scale(k=4, n=16)
        4.0

    Source: Chen et al. 2016; Xu et al. (DBW) 2020, Sect. 4; Li et al. (Sync-Switch) 2021, Sect. IV-C.
    """

    rule: str = "constant"
    lr_is: str = "total"

    def __post_init__(self) -> None:
        if self.rule not in {"constant", "proportional"}:
            raise UsageError(f"lr_rule = {self.rule!r}, expected 'constant' or 'proportional'")
        if self.lr_is not in {"total", "per_worker"}:
            raise UsageError(f"lr_is = {self.lr_is!r}, expected 'total' or 'per_worker'")

    def scale(self, k: int, n: int) -> float:
        """Return eta(k) divided by the optimizer's own rate; k and n are at least 1."""
        share = k / n if self.rule == "proportional" else 1.0
        return share * n if self.lr_is == "per_worker" else share
