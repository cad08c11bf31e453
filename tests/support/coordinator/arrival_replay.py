"""Events of another run, replayed with gradients that are computed again."""

from paceline.core.events import UpdateApplied
from paceline.engines.loop import RunLoop
from paceline.engines.virtual.parameter_server import SimulatedServer
from paceline.engines.virtual.timing import TimedWorkers


class ReplayedWorkers(TimedWorkers):
    """Workers, and the clock, of a run of which the events are known."""

    def __init__(self, cluster, events):
        super().__init__(cluster, seed=0)
        self._recorded = list(reversed(events))

    def next_event(self, on_idle):
        event = self._recorded.pop()
        self.now = event.now
        return event

    def tick(self):
        """Leave out the event of a measured step, which the loop makes at the same time."""
        if self._recorded and isinstance(self._recorded[-1], UpdateApplied):
            self.now = self._recorded.pop().now

    def set_timer(self, command):
        pass


def arrival_replay(cluster, replica, server, events, parameters=SimulatedServer):
    """Return the loop of a run with these events, of which the gradients are computed again."""
    workers = ReplayedWorkers(cluster, events)
    return RunLoop(workers, parameters(workers, replica, server, cluster.network.wire), workers)


def noted_events(monkeypatch):
    """Return a list to which the events of the next run with a server are added."""
    heard, run = [], RunLoop.run

    def noting(loop, coordinator, observe=None, first=None):
        if observe is None:  # the replay
            return run(loop, coordinator, observe, first)

        def note(now, event, commands):
            if event is not None:
                heard.append(event)
            observe(now, event, commands)

        return run(loop, coordinator, note, first)

    monkeypatch.setattr(RunLoop, "run", noting)
    return heard
