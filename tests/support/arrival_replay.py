"""Engine that replays the events of another engine's run."""

from paceline.core.events import Arrival
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
