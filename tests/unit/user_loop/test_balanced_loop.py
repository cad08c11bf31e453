"""Attached loops under `balanced`, as threads: an iteration is a lease, and the updates are those of BSP."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import paceline as pl
from attached_threads import AttachedThreads
from loop_parts import BATCH, SAMPLES, adamw, make_parts, sgd, step
from paceline.core.records import GradientArrived
from paceline.integrations.whole_batches import check_whole_batches
from selections import parametrize_few

EXACT = 1e-12
RANKS = 3
UPDATES = 2 * SAMPLES // (BATCH * RANKS)  # of two epochs


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 1)).double()


def trained(data, protocol, make_optimizer=sgd, *, server=True, accumulate=1, **settings):
    """Return the ranks after two epochs, and what their loops have seen: numbers of samples, and steps by updates."""

    def loop(run, model, optimizer):
        seen, stepped = Counter(), Counter()
        for _ in run.epochs(2):
            batches = []
            for batch in run.loader:
                seen.update(int(number) for number in batch[1])
                batches.append(batch)
                if len(batches) == accumulate:
                    step(model, optimizer, batches)
                    stepped[run.stepped] += 1
                    batches = []
        return seen, stepped

    parts = make_parts(network(), data, make_optimizer, batch_size=BATCH // accumulate)
    ranks = AttachedThreads(RANKS, parts, protocol, server=server, accumulate=accumulate, **settings)
    seen = ranks.run(loop)
    for each in seen:
        if isinstance(each, BaseException):
            raise each
    return ranks, seen


CASES = [
    ("balanced(m=4)", sgd, True, 1),
    ("balanced(m=4)", adamw, False, 1),
    ("balanced(m=2)", sgd, False, 2),
    ("balanced(m=4, leases=1)", sgd, True, 1),
    ("balanced(m=4, backups=false)", adamw, True, 1),
    ("balanced(m=1)", adamw, False, 1),
]


@parametrize_few(("protocol", "make_optimizer", "server", "accumulate"), CASES, keep=3)
def test_the_updates_are_those_of_bsp(protocol, make_optimizer, server, accumulate, data, tmp_path):
    out = tmp_path / "run"
    settings = {"clip_norm": 0.05, "accumulate": accumulate}
    ranks, seen = trained(data, protocol, make_optimizer, server=server, out=out, **settings)
    bsp, _ = trained(data, "bsp", make_optimizer, **settings)
    for model, _, _ in ranks.parts:
        for ours, theirs in zip(model.parameters(), bsp.parts[0][0].parameters(), strict=True):
            assert (ours - theirs).abs().max() < EXACT
    used = [each for each in ranks.server.result.history.of(GradientArrived) if each.used]
    samples = sum((numbers for numbers, _ in seen), Counter())
    assert all(samples[number] >= 2 for number in range(SAMPLES)), "a repeated lease is read twice"
    # A rank whose lease another one has repeated may miss an update.
    assert all(UPDATES // 2 < steps[True] <= UPDATES for _, steps in seen)
    assert sum(each[True] + each[False] for _, each in seen) >= len(used) >= UPDATES
    assert pl.replay(out).is_same


def test_a_smaller_last_minibatch_and_uneven_pieces_are_refused(data, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)

    def attach(protocol, accumulate=1, **loader):
        model = network()
        optimizer, batches = sgd(model), DataLoader(data, shuffle=True, **loader)
        return pl.attach(model, optimizer, batches, protocol=protocol, accumulate=accumulate, stop="updates=2")

    with pytest.raises(pl.UsageError, match=r"minibatches of 10 samples, and the last one of an epoch has 8: give the"):
        attach("balanced(m=2)", batch_size=10)
    with pytest.raises(pl.UsageError, match=r"pieces of 3 samples, which accumulate=2 batches cannot share evenly"):
        attach("balanced(m=4)", accumulate=2, batch_size=6)


def test_a_framework_that_counts_steps_refuses_leases():
    check_whole_batches("k_sync(k=3)")
    with pytest.raises(pl.UsageError, match="counts every step as an update: type bsp"):
        check_whole_batches("balanced(m=8)")
