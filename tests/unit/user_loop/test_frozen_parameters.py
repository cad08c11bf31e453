"""Frozen parameters of attached models: in the file of the trained model, and named if they change."""

import pytest
import torch
from safetensors.torch import load_file

from allreduce_loops import AllReduceLoops
from attached_threads import AttachedThreads
from loop_parts import make_network, make_parts, numbered_data, step
from selections import parametrize_each_once

SERVED = [("bsp", AttachedThreads), ("bsp + local_steps(H=2)", AttachedThreads)]


def trained(protocol, kind, by, **settings):
    """Train with a frozen parameter that grows in each step, and return its values on rank 0."""

    def loop(run, model, optimizer):
        seen = []
        for _ in run.epochs(2):
            for batch in run.loader:
                seen.append(float(model.frozen))
                step(model, optimizer, [batch])
                with torch.no_grad():
                    if by:
                        model.frozen.add_(by)
        return seen

    ranks = kind(2, make_parts(make_network(), numbered_data()), protocol, **settings)
    return ranks, ranks.run(loop)[0]


@parametrize_each_once(protocol__kind=[*SERVED, ("all_reduce", AllReduceLoops)], by=[0.0, 0.01])
def test_the_file_of_the_model_has_them(by, protocol, kind, tmp_path):
    ranks, seen = trained(protocol, kind, by, out=tmp_path / "run")
    assert len(seen) == 12
    own, saved = ranks.parts[0][0].state_dict(), load_file(tmp_path / "run/model.safetensors")
    assert {*own} - {"second.weight"} == {*saved}  # that weight is tied to the first one
    assert abs(saved["frozen"].item() - own["frozen"].item()) < by + 1e-9  # after the last step the file is written
    assert all(torch.equal(saved[name], own[name]) for name in saved if name != "frozen")


@pytest.mark.parametrize(("protocol", "kind"), SERVED)
@pytest.mark.parametrize("by", [0.0, 0.01])
def test_one_that_changes_is_named_once_by_each_rank(by, protocol, kind, caplog):
    trained(protocol, kind, by)
    said = [each for each in caplog.messages if "frozen of the model changes although it is frozen" in each]
    assert len(said) == (2 if by else 0)


def test_without_a_server_a_resumed_run_begins_with_those_of_its_checkpoint(tmp_path):
    _, before = trained("all_reduce", AllReduceLoops, 0.01, out=tmp_path / "run", stop="updates=4")
    _, after = trained("all_reduce", AllReduceLoops, 0.01, resume=tmp_path / "run")
    assert after[0] == pytest.approx(before[-1], abs=0.011)
