"""Attached loops under `balanced`, as threads: an iteration is a lease, and the updates are those of BSP."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.utils.data import DataLoader

import paceline as pl
from attached_threads import AttachedThreads
from loop_parts import BATCH, SAMPLES, adamw, make_parts, sgd, step
from paceline.core.gradient import SKIPPED
from paceline.core.records import GradientArrived, UpdateMade
from paceline.integrations.counted_steps import check_counted_steps
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


def weighted(data, protocol, weigh, *, server=True):
    """Return the ranks after an epoch with a mean over tokens, of which a sample has 1 to 3, and their batches."""

    def loop(run, model, optimizer):
        batches = []
        for _ in run.epochs(1):
            for x, number in run.loader:
                optimizer.zero_grad()
                tokens = tokens_of(number)
                weigh(run, tokens)
                (((model(x) - number / SAMPLES) ** 2 * tokens).sum() / tokens.sum()).backward()
                optimizer.step()
                batches.append((x, number))
        return batches

    ranks = AttachedThreads(2, make_parts(network(), data, adamw), protocol, server=server)
    return ranks, ranks.run(loop)


def tokens_of(number):
    return 1 + number % 3


def by_tokens(run, tokens):
    run.weight(tokens.sum())


@parametrize_few(
    ("protocol", "server"), [("balanced(m=4)", False), ("bsp", False), ("balanced(m=4)", True), ("bsp", True)], keep=2
)
def test_all_tokens_of_an_update_count_alike(protocol, server, data):
    ranks, _ = weighted(data, protocol, by_tokens, server=server)
    _, steps = weighted(data, "bsp", by_tokens)
    model = network()
    optimizer = adamw(model)
    for batches in zip(*steps, strict=True):
        x, number = map(torch.cat, zip(*batches, strict=True))
        tokens = tokens_of(number)
        optimizer.zero_grad()
        (((model(x) - number / SAMPLES) ** 2 * tokens).sum() / tokens.sum()).backward()
        optimizer.step()
    for ours, theirs in zip(ranks.parts[0][0].parameters(), model.parameters(), strict=True):
        assert (ours - theirs).abs().max() < EXACT


def test_a_loss_that_is_no_mean_over_samples_is_refused_without_a_weight(data):
    _, answers = weighted(data, "balanced(m=4)", lambda run, tokens: None)
    told = [str(each) for each in answers if isinstance(each, pl.UsageError)]
    assert told
    assert "the graph of the loss does not show a mean over samples (Sum): call run.weight(n) before" in told[0]
    _, answers = weighted(data, "bsp", lambda run, tokens: None)
    assert not [each for each in answers if isinstance(each, BaseException)]


def test_a_loss_that_is_not_seen_needs_a_weight(data):
    def attached(weigh):
        def loop(run, model, optimizer):
            for _ in run.epochs(1):
                for x, number in run.loader:
                    loss = ((model(x) - number / SAMPLES) ** 2).mean()
                    for parameter, each in zip(
                        model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
                    ):
                        parameter.grad = each
                    weigh(run, x)
                    optimizer.step()

        return AttachedThreads(2, make_parts(network(), data), "balanced(m=4)").run(loop)

    assert "(backward() was not seen)" in " ".join(map(str, attached(lambda run, x: None)))
    assert attached(lambda run, x: run.weight(len(x))) == [None, None]


def test_a_weight_that_is_left_out_later_is_an_error(data):
    def once(run, tokens):
        if run.update == 0:
            run.weight(tokens.sum())

    _, answers = weighted(data, "bsp", once)
    assert "run.weight() was not called in this step, but in an earlier one" in " ".join(map(str, answers))


@pytest.mark.parametrize("weight", [-1, float("nan"), torch.tensor(float("inf"))])
def test_a_weight_out_of_range_is_refused(weight, data):
    _, answers = weighted(data, "bsp", lambda run, tokens: run.weight(weight))
    assert ", expected a number >= 0, as the tokens of the batch that count" in " ".join(map(str, answers))


def test_the_weight_of_a_skipped_step_is_not_added_to_the_next_one(data, tmp_path):
    def weigh(run, tokens):
        if not skipped:
            skipped.append(run)
            run.weight(1e6)
            run.skip()
        run.weight(tokens.sum())

    skipped = []
    ranks, answers = weighted(data, "bsp", weigh)
    assert not [each for each in answers if isinstance(each, BaseException)]
    assert max(each.weight for each in ranks.server.result.history.of(GradientArrived)) <= 3 * BATCH


def test_a_batch_of_weight_zero_is_skipped(data):
    def weigh(run, tokens):
        run.weight(0 if run.update == 2 and not zeros and not zeros.append(run) else tokens.sum())

    zeros = []
    ranks, answers = weighted(data, "bsp", weigh)
    assert not [each for each in answers if isinstance(each, BaseException)]
    dropped = [each for each in ranks.server.result.history.of(GradientArrived) if not each.used]
    assert [each.reason for each in dropped] == [SKIPPED]


def scaled(run, model, optimizer, overflows):
    """Train an epoch with a GradScaler; return its scale, the batches, and what became of the gradients."""
    scaler, batches, fates = GradScaler("cpu", init_scale=8.0, growth_interval=1000), [], []
    for _ in run.epochs(1):
        for x, number in run.loader:
            optimizer.zero_grad()
            loss = ((model(x) - number / SAMPLES) ** 2).mean()
            scaler.scale(loss * (torch.inf if overflows and not batches else 1.0)).backward()
            batches.append((x, number))
            scaler.step(optimizer)
            scaler.update()
            fates.append(run.last.fate)
    return scaler.get_scale(), batches, fates


@pytest.mark.parametrize("server", [True, False])
@parametrize_few("protocol", ["balanced(m=4)", "balanced(m=4, leases=1)"], keep=1)
def test_an_overflow_at_one_rank_skips_the_update_and_lowers_the_scale_of_all(protocol, server, data, tmp_path):
    def loop(run, model, optimizer):
        runs.append(run)
        return scaled(run, model, optimizer, overflows=run is runs[0])

    runs, out = [], tmp_path / "run"
    ranks = AttachedThreads(2, make_parts(network(), data, adamw), protocol, server=server, out=out)
    answers = ranks.run(loop)
    assert [scale for scale, *_ in answers] == [4.0, 4.0]
    told = sorted(fate for *_, fates in answers for fate in fates if fate in ("skipped", "dropped"))
    assert told in (["dropped", "skipped"], ["skipped"])  # a rank may hear of it before its first step
    assert [each.k for each in ranks.server.result.history.of(UpdateMade)].count(0) == 1
    bsp = AttachedThreads(2, make_parts(network(), data, adamw), "bsp")
    steps = [batches for _, batches, _ in bsp.run(lambda *parts: scaled(*parts, overflows=False))]
    model = network()
    optimizer = adamw(model)
    for batches in list(zip(*steps, strict=True))[1:]:
        x, number = map(torch.cat, zip(*batches, strict=True))
        optimizer.zero_grad()
        ((model(x) - number / SAMPLES) ** 2).mean().backward()
        optimizer.step()
    for ours, _, _ in ranks.parts:
        for parameter, theirs in zip(ours.parameters(), model.parameters(), strict=True):
            assert (parameter - theirs).abs().max() < EXACT
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
    check_counted_steps("k_sync(k=3)")
    check_counted_steps("balanced(m=8, leases=1)")
    with pytest.raises(pl.UsageError, match=r"counts every step as an update: type balanced\(m=8, leases=1\)"):
        check_counted_steps("balanced(m=8)")
