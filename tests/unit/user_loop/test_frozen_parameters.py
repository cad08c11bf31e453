"""Frozen parameters of attached models, as of a teacher: in the file of the trained model, and in a resumed run."""

from contextlib import suppress

import pytest
import torch
from safetensors.torch import load_file

import paceline as pl
from allreduce_loops import AllReduceLoops
from attached_threads import AttachedThreads
from loop_parts import make_network, make_parts, numbered_data, step, train
from selections import each_value_once, parametrize_each_once, parametrize_few

SERVED = [("bsp", AttachedThreads), ("bsp + local_steps(H=2)", AttachedThreads)]
BY = 1 / 64  # exact in sums
STEPS = 24  # of all ranks in a whole run


def grow(model):
    model.frozen.add_(BY)


def grow_data(model):
    model.frozen.data.add_(BY)  # as DINO does


def assign_data(model):
    model.frozen.data = model.frozen.data + BY  # as MoCo does


def trained(protocol, kind, change, *, count=2, within_forward=False, fails_at=None, **settings):
    """Train with a function that changes a frozen parameter once in each step; return its values at rank 0 before."""

    def loop(run, model, optimizer):
        seen = []
        if change is not None and within_forward:
            model.register_forward_pre_hook(lambda *_: torch.no_grad()(change)(model))
        for _ in run.epochs(2):
            for batch in run.loader:
                if len(seen) == fails_at:
                    raise ZeroDivisionError
                seen.append(float(model.frozen))
                step(model, optimizer, [batch])
                if change is not None and not within_forward:
                    with torch.no_grad():
                        change(model)
        return seen

    ranks = kind(count, make_parts(make_network(), numbered_data()), protocol, **settings)
    failures = [pl.RunError] if fails_at else []  # of the server, to which a rank has failed
    with suppress(*failures):
        ranks.run(loop)
    return ranks, ranks.answers[0]


@parametrize_each_once(protocol__kind=[*SERVED, ("all_reduce", AllReduceLoops)], change=[None, grow])
def test_the_file_of_the_model_has_them(change, protocol, kind, tmp_path):
    ranks, seen = trained(protocol, kind, change, out=tmp_path / "run")
    assert len(seen) == STEPS // 2
    own, saved = ranks.parts[0][0].state_dict(), load_file(tmp_path / "run/model.safetensors")
    assert {*own} - {"second.weight"} == {*saved}  # that weight is tied to the first one
    assert abs(saved["frozen"].item() - own["frozen"].item()) <= BY  # after the last step the file is written
    assert all(torch.equal(saved[name], own[name]) for name in saved if name != "frozen")


CHANGES = [(grow, False), (grow_data, False), (assign_data, False), (grow_data, True)]


@parametrize_few(("mode", "how", "fails_at"), each_value_once(SERVED, CHANGES, [None, 6]), keep=1)
def test_a_resumed_run_continues_with_those_that_change(mode, how, fails_at, tmp_path):
    change, within_forward = how
    count = 1 if fails_at else 2  # where one of several fails, the others may make another update
    given = {"count": count, "within_forward": within_forward, "checkpoint_every": "updates=1"}
    stop = {} if fails_at else {"stop": "updates=5" if mode[0] == "bsp" else "updates=3"}
    trained(*mode, change, fails_at=fails_at, out=tmp_path / "run", **given, **stop)
    ranks, seen = trained(*mode, change, resume=tmp_path / "run", **given)
    assert 0 < len(seen) < STEPS // count
    assert [model.frozen.item() for model, _, _ in ranks.parts] == [1 + STEPS // count * BY] * count


@pytest.mark.slow
def test_without_a_server_a_resumed_run_begins_with_those_of_its_checkpoint(tmp_path):
    _, before = trained("all_reduce", AllReduceLoops, grow, out=tmp_path / "run", stop="updates=4")
    _, after = trained("all_reduce", AllReduceLoops, grow, resume=tmp_path / "run")
    assert after[0] == pytest.approx(before[-1], abs=BY)


@pytest.mark.slow
def test_those_that_do_not_change_are_in_no_checkpoint(tmp_path):
    trained(*SERVED[0], None, out=tmp_path / "run", checkpoint_every="updates=1")
    assert not (tmp_path / "run" / "workers").exists()


@pytest.mark.parametrize("differ", [False, True])
@pytest.mark.parametrize(("protocol", "kind"), [*SERVED, ("all_reduce", AllReduceLoops)])
def test_a_rank_that_has_others_is_named_or_takes_those_of_rank_0(protocol, kind, differ, caplog):
    values = iter([1.0, 2.0] if differ else [1.0, 1.0])
    make = make_parts(make_network(), numbered_data())

    def make_others():
        parts = make()
        torch.nn.init.constant_(parts[0].frozen, next(values))
        return parts

    ranks = kind(2, make_others, protocol)
    ranks.run(train(epochs=1))
    said = [each for each in caplog.messages if "has other frozen parameters than rank 0" in each]
    ours = {float(model.frozen) for model, _, _ in ranks.parts}
    is_sent = kind is AllReduceLoops
    assert len(said) == (differ and not is_sent)
    assert len(ours) == 1 + (differ and not is_sent)
