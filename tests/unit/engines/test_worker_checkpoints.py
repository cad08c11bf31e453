"""Which state a worker of a server saves and restores, and when."""

import pytest
import torch

from paceline.engines.worker_checkpoints import WorkerCheckpoints
from paceline.errors import RunError
from paceline.worker.replica import Replica
from paceline.worker.task_progress import TaskProgress
from tiny_jobs import tiny_job


class Worker:
    """Worker that sends compressed gradients; each one leaves out its own draw."""

    def __init__(self, folder, worker=3):
        self._replica = Replica(tiny_job(), seed=0, n=4)
        self.left_out = self._replica.layout.allocate()
        self._checkpoints = WorkerCheckpoints(folder, worker, self._replica, [self.left_out])

    def compute(self, draw, accepted, saved):
        self._replica.progress = TaskProgress(accepted=accepted, saved=saved)
        self._checkpoints.before_task(draw)
        begins_with = float(self.left_out.flat_parameters[0][0])
        self.left_out.flat_parameters[0].fill_(draw)
        return begins_with

    def end(self):
        self._checkpoints.at_end()


def test_a_worker_begins_with_what_its_gradients_had_left_out_at_the_newest_checkpoint(tmp_path):
    worker = Worker(tmp_path)
    assert [worker.compute(draw, accepted=draw - 1, saved=5 * ((draw - 2) // 5)) for draw in range(1, 10)] == [
        *range(9)
    ]
    assert Worker(tmp_path).compute(12, accepted=6, saved=0) == 6  # saved before draw 7
    assert Worker(tmp_path, worker=2).compute(12, accepted=6, saved=0) == 0


def test_the_last_state_is_saved_at_the_end_and_later_states_are_removed_where_a_run_is_repeated(tmp_path):
    worker = Worker(tmp_path)
    for draw in range(1, 5):
        worker.compute(draw, accepted=draw - 1, saved=0)
    worker.end()
    assert Worker(tmp_path).compute(9, accepted=4, saved=0) == 4
    assert (
        Worker(tmp_path).compute(9, accepted=3, saved=0) == 4
    )  # what a message leaves out does not wait for acceptance
    assert Worker(tmp_path).compute(9, accepted=4, saved=0) == 4
    assert Worker(tmp_path).compute(9, accepted=2, saved=0) == 0
    assert Worker(tmp_path).compute(9, accepted=4, saved=0) == 0  # those after 2 are removed


@pytest.mark.parametrize("folder", ["given", None])
def test_a_run_without_a_folder_saves_nothing_and_warns_of_nothing(folder, tmp_path, caplog):
    worker = Worker(tmp_path if folder else None)
    worker.compute(1, accepted=0, saved=0)
    worker.compute(2, accepted=1, saved=1)
    worker.end()
    assert bool([*tmp_path.iterdir()]) == bool(folder)
    assert Worker(None).compute(2, accepted=1, saved=0) == 0
    assert caplog.records == []


def test_the_state_of_another_model_is_an_error(tmp_path, caplog):
    worker = Worker(tmp_path)
    worker.compute(1, accepted=0, saved=0)
    worker.end()
    other = Worker(tmp_path)
    other._checkpoints._left_out = [
        Replica(tiny_job(model=lambda: torch.nn.Linear(5, 3).double()), 0, 4).layout.allocate()
    ]
    with pytest.raises(RunError, match=r"workers/3 holds what no run writes .*a tensor is"):
        other.compute(2, accepted=1, saved=0)
