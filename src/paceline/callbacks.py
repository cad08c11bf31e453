"""Callbacks of a run, and the records that they receive."""

from paceline.core.events import Arrival
from paceline.core.records import GradientArrived, StepMeasured, UpdateMade
from paceline.recording.callback import Callback, RunInfo
from paceline.recording.callbacks.mlflow import MLflow
from paceline.recording.callbacks.open_telemetry import OpenTelemetry
from paceline.recording.callbacks.perfetto_trace import PerfettoTrace
from paceline.recording.callbacks.prometheus import Prometheus
from paceline.recording.callbacks.tensorboard import TensorBoard
from paceline.recording.callbacks.trackio import Trackio
from paceline.recording.callbacks.wandb import Wandb

__all__ = [
    "Arrival",
    "Callback",
    "GradientArrived",
    "MLflow",
    "OpenTelemetry",
    "PerfettoTrace",
    "Prometheus",
    "RunInfo",
    "StepMeasured",
    "TensorBoard",
    "Trackio",
    "UpdateMade",
    "Wandb",
]
