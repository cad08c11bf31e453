"""Settings of a balanced script, which its launcher passes to the ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from paceline.errors import UsageError
from paceline.policies.shares import Pieces

VARIABLE = "PACELINE_BALANCE"  # settings as JSON, in the environment of the ranks
ON_DEATH = ("survive", "restart")
WEIGHED_BY = ("auto", "samples", "tokens", "none")


@dataclass(frozen=True, kw_only=True)
class BalanceSettings:
    """Settings of the shares.

    Attributes:
        pieces: m, pieces of a rank's batch, >= 1.
        max_share: largest share as a multiple of the batch, >= 1.
        weigh: what backward passes are weighed by; "auto" to read it from the graph of the loss.
        cost: path of a file with the cost of each sample, or a function of its index; "none" for no costs; None to look
            for lengths in the data set.
        dry_run: whether the script ends once it is known what is taken over.
        on_death: what follows the loss of a rank: the others "survive" it where they can, or all "restart".
        out: folder of the run; None for none.
        overwrite: whether to replace an earlier run in that folder.
        metrics: PORT or HOST:PORT at which the metrics of the run are served; None for nowhere.
        launch: name that all starts of the ranks by one launcher share; empty if it has none.
    """

    pieces: int = 8
    max_share: float = 1.5
    weigh: Literal["auto", "samples", "tokens", "none"] = "auto"
    cost: Callable[[Any], float] | str | None = None
    dry_run: bool = False
    on_death: Literal["survive", "restart"] = "survive"
    out: str | None = None
    overwrite: bool = False
    metrics: str | None = None
    launch: str = ""

    def __post_init__(self) -> None:
        Pieces(1, self.pieces, self.max_share)
        if self.weigh not in WEIGHED_BY:
            raise UsageError(f"weigh={self.weigh!r}, expected one of {', '.join(WEIGHED_BY)}")
        if self.on_death not in ON_DEATH:
            raise UsageError(f"on_death={self.on_death!r}, expected one of {', '.join(ON_DEATH)}")

    def environment(self) -> dict[str, str]:
        """Return the variable that passes these settings to a rank."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> BalanceSettings | None:
        """Return the settings that a launcher has passed; None without."""
        text = environment.get(VARIABLE)
        return cls(**json.loads(text)) if text else None
