"""Plans: protocols, phases, and what may be added to them."""

from paceline.core.duration import Duration
from paceline.policies.compensation.base import Compensator, StaleGradient, chain
from paceline.policies.learning_rate import LinearSchedule
from paceline.protocols.allreduce import AllReduceConfig
from paceline.protocols.local_steps import LocalSteps
from paceline.protocols.outer_optimizer import DelayedNesterov, OuterSGD
from paceline.protocols.protocol import Phase, Plan, Protocol

__all__ = [
    "AllReduceConfig",
    "Compensator",
    "DelayedNesterov",
    "Duration",
    "LinearSchedule",
    "LocalSteps",
    "OuterSGD",
    "Phase",
    "Plan",
    "Protocol",
    "StaleGradient",
    "chain",
]
