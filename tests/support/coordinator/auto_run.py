"""Run of `auto` on workers whose round trips are given."""

from arrivals import arrival
from paceline.catalogue.protocols import bsp
from paceline.policies.controllers.base import ChangeProtocol, Observation
from paceline.policies.estimators.noise.critical_batch import NoiseEstimate
from paceline.policies.noise_rule import NoiseRule, NoiseScaling

N = 4


class AutoRun:
    """Auto on N workers whose round trips are given; every four arrivals are an update."""

    def __init__(self, controller, phi=1.0, has_fallen=True, momentum=0.0, adaptive=False, prepares=0):
        self.prepares = prepares  # calls before each decision
        self.loss = 1.0
        self.controller, self.phi, self.has_fallen = controller, phi, has_fallen
        self.rule = NoiseRule(K=N, learning_rate=0.1, momentum=momentum, adaptive=adaptive)
        self.state = controller.begin(N)
        self.protocol, self.workload, self.version, self.actions = bsp(), 0, 0, []
        self.now = 0.0
        self.ask("open")

    def ask(self, trigger, **more):
        observation = Observation(
            trigger=trigger,
            now=self.now,
            version=self.version,
            opened_s=0.0,
            live=N,
            held=0,
            quorum=1,
            protocol=self.protocol,
            workload=self.workload,
            learning_rate=NoiseScaling(rule=self.rule, phi=self.phi),
            workers=range(N) if trigger == "open" else (),
            noise=NoiseEstimate(variance=1.0, to_go=1.0, phi=self.phi, has_fallen=self.has_fallen),
            **more,
        )
        for _ in range(self.prepares):
            self.state = self.controller.prepare(self.state)
        self.state, actions = self.controller.decide(self.state, observation)
        for action in actions:
            self.actions.append((self.workload, action))
            if isinstance(action, ChangeProtocol):
                self.protocol = action.protocol

    def work(self, rounds, trips_s, **more):
        for _ in range(rounds):
            for worker, trip_s in enumerate(trips_s):
                self.workload += 1
                self.now += 1.0
                self.ask(
                    "arrival", arrival=arrival(0.0, worker, 1, loss=self.loss), trip_s=trip_s, accepted=True, **more
                )
            self.version += 1
            self.ask("open")

    @property
    def changes(self):
        return [(at, action.protocol.name) for at, action in self.actions if isinstance(action, ChangeProtocol)]
