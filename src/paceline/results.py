"""Results of runs, comparisons and searches, and what is estimated from them."""

from paceline.core.events import Outcome
from paceline.experiments.advise.constants import estimate_constants
from paceline.experiments.advise.result import Advice, Prediction
from paceline.experiments.comparison import Comparison
from paceline.experiments.switch_point.result import SwitchSearch
from paceline.recording.history import History
from paceline.run.replay import Replay
from paceline.run.result import Result
from paceline.run.simulate import Simulated

__all__ = [
    "Advice",
    "Comparison",
    "History",
    "Outcome",
    "Prediction",
    "Replay",
    "Result",
    "Simulated",
    "SwitchSearch",
    "estimate_constants",
]
