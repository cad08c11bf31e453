"""Controllers: the bundled ones, and the parts of an own one."""

from paceline.policies.controllers.adasync import AdaSync
from paceline.policies.controllers.auto import Auto
from paceline.policies.controllers.balance import Balance
from paceline.policies.controllers.base import (
    Action,
    CallAgainAt,
    ChangeProtocol,
    CloseUpdate,
    Controller,
    Exclude,
    LeaseRule,
    Note,
    Observation,
    Probe,
    Readmit,
    ReplaceWorker,
    RestartWork,
    SetLead,
    SetQuorum,
    SetShares,
)
from paceline.policies.controllers.dbw import BDBW, DBW
from paceline.policies.controllers.dynamic_lead import DynamicLead
from paceline.policies.controllers.fixed_quorum import FixedQuorum, QuorumFunction, ScheduledQuorum
from paceline.policies.controllers.grace import Grace
from paceline.policies.controllers.idle_workers import IdleWorkers
from paceline.policies.controllers.patient import Patient
from paceline.policies.controllers.restart_after import RestartAfter
from paceline.policies.controllers.straggler_policies import Elastic, Greedy, Stragglers

__all__ = [
    "BDBW",
    "DBW",
    "Action",
    "AdaSync",
    "Auto",
    "Balance",
    "CallAgainAt",
    "ChangeProtocol",
    "CloseUpdate",
    "Controller",
    "DynamicLead",
    "Elastic",
    "Exclude",
    "FixedQuorum",
    "Grace",
    "Greedy",
    "IdleWorkers",
    "LeaseRule",
    "Note",
    "Observation",
    "Patient",
    "Probe",
    "QuorumFunction",
    "Readmit",
    "ReplaceWorker",
    "RestartAfter",
    "RestartWork",
    "ScheduledQuorum",
    "SetLead",
    "SetQuorum",
    "SetShares",
    "Stragglers",
]
