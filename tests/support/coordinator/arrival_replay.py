"""Engine that replays the events of another engine's run."""

from paceline.core.events import Arrival
from paceline.engines import distributed
from paceline.engines.distributed import ParameterServerEngine
from paceline.engines.virtual.parameter_server import VirtualEngine


class ArrivalReplay(VirtualEngine):
    """Engine that replays the events of another engine's run and computes the gradients itself."""

    def __init__(self, *args, events, **settings):
        super().__init__(*args, **settings)
        self._recorded = iter(events)

    def next_event(self):
        event = next(self._recorded)
        self.now = event.now
        if isinstance(event, Arrival) and self._draw_of(event.worker) == event.draw:
            self._steps[event.worker] = event.minibatches
            return self._arrival(event.worker, event.draw)
        return event

    def _draw_of(self, worker):
        """Return the draw under way, None if the worker's gradient came although its work was interrupted."""
        return self._work[worker].draw if worker in self._work else None

    def report_step(self, command, step):
        if step is not None:  # at its recorded time, which controllers use
            self._applied = next(self._recorded)._replace(step=step)

    def set_timer(self, command):
        pass

    def evaluate(self, command):
        pass


def noted_events(monkeypatch):
    """Return a list to which the events of the next run with a server are added."""
    heard = []

    class Noting(ParameterServerEngine):
        def run(self, coordinator, observe=None, first=None):
            def note(now, event, commands):
                if event is not None:
                    heard.append(event)
                observe(now, event, commands)

            return super().run(coordinator, note, first)

    monkeypatch.setattr(distributed, "ParameterServerEngine", Noting)
    return heard
