"""Scripts under `paceline run` that destroy process groups, and go on."""

import pytest
import torch
from torch.utils.data import DataLoader

import process_groups
from launched_commands import run_on_ranks
from paceline.core.events import Outcome
from paceline.core.records import RunEnded, WorkerLost
from paceline.recording.run_folder import SavedRun
from process_groups import BATCH, EPOCHS, parts

pytestmark = [pytest.mark.slow]
RANKS = 2


def run(folder, case):
    """Return what the script has printed, and the parameters of its trainings by their name."""
    printed = run_on_ranks(
        RANKS, process_groups.__file__, case, folder / "failed", cwd=folder, options=("--out", "here")
    )
    words = [line.split()[2:] for line in printed.splitlines() if " first " in line or " second " in line]
    return printed, [(name, [float(value) for value in values]) for name, *values in words]


def records_of(folder):
    return SavedRun(folder / "here").history.records


def expected():
    """Return the parameters of one process with the batches of all ranks."""
    data, model = parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(EPOCHS):
        for x, y in DataLoader(data, batch_size=RANKS * BATCH):
            optimizer.zero_grad()
            (model(x) - y).pow(2).mean().backward()
            optimizer.step()
    return pytest.approx(model.weight.flatten().tolist(), abs=1e-6)


def test_a_temporary_group_ends_no_training(tmp_path):
    _, found = run(tmp_path, "temporary")
    assert found == [("first", expected())] * RANKS
    assert records_of(tmp_path)[-1].reason == "the script has ended"


def test_a_training_in_another_group_of_all_ranks_has_equal_shares(tmp_path):
    printed, found = run(tmp_path, "anew")
    assert sorted(found) == [(name, expected()) for name in ("first", "second") for _ in range(RANKS)]
    assert "the script has made another process group, and what it trains there has equal shares" in printed
    assert "a lost rank starts all ranks again, because the script has destroyed its process group" in printed


def test_a_rank_that_destroys_its_group_as_it_fails_is_lost(tmp_path):
    printed, found = run(tmp_path, "fails")
    assert (tmp_path / "failed").exists()
    assert "1 rank goes on: 0" in printed
    assert "first" in [name for name, _ in found]
    records = records_of(tmp_path)
    assert [each.worker for each in records if isinstance(each, WorkerLost)] == [1]
    assert [each.outcome for each in records if isinstance(each, RunEnded)] == [Outcome.STOPPED]
