"""Controller driven without a coordinator, by observations of updates with given times and losses."""

import paceline as pl
from arrivals import arrival
from paceline.core.events import Step
from paceline.policies.controllers.base import Observation, SetQuorum
from paceline.policies.learning_rate import LRScaling


class Driven:
    """Driver of a controller: gradients of each update arrive after given times."""

    def __init__(self, controller, n, protocol=None, learning_rate=None):
        self.controller, self.n = controller, n
        self.learning_rate = learning_rate or LRScaling()
        self.protocol = protocol or pl.backup(k=1)
        self.state = controller.begin(n)
        self.version, self.now, self.opened_s, self.update_size = 0, 0.0, 0.0, 0
        self.held = 0
        self.schedule_scale = 1.0
        self.actions = []
        self.ask("open")

    def ask(self, trigger, step=None, **more):
        observation = Observation(
            trigger=trigger,
            now=self.now,
            version=self.version,
            opened_s=self.opened_s,
            live=self.n,
            held=self.held,
            quorum=1,
            protocol=self.protocol,
            workload=0,
            learning_rate=self.learning_rate,
            schedule_scale=self.schedule_scale,
            update_size=self.update_size,
            step=step,
            **more,
        )
        self.state, self.actions = self.controller.decide(self.state, observation)

    @property
    def k(self):
        [quorum] = [action for action in self.actions if isinstance(action, SetQuorum)]
        return quorum.k

    @property
    def reason(self):
        return next(action.reason for action in self.actions if isinstance(action, SetQuorum))

    def update(
        self, loss, times=None, squared_norm=1.0, mean_norm=0.9, rate=0.1, next_rate=None, variance=float("nan")
    ):
        """Observe k gradients that arrive after these times, and make the update."""
        k = self.k
        for worker, after_s in enumerate((times or range(1, self.n + 1))[:k]):
            self.now = self.opened_s + after_s
            arrived = arrival(self.now, worker, 1, loss=loss, squared_norm=squared_norm, variance=variance)
            self.ask("arrival", arrival=arrived, accepted=True)
        self.version += 1
        self.update_size, self.opened_s = k, self.now
        step = Step(
            squared_norm=mean_norm,
            progress=rate * mean_norm,
            squared_step=rate**2 * mean_norm,
            learning_rate=rate,
            next_learning_rate=next_rate or rate,
        )
        self.ask("open", step=step)
        return self.k
