"""An unchanged script in the shape of torchvision's: what it prints and saves is that of equal shares."""

import json

import pytest
import torch

import reference_script
from balanced_ranks import printed_by
from launched_commands import run_on_ranks

OF_ITS_SHARE = "loss of this rank"


def largest_distance(ours, theirs):
    """Return how far two states differ at most, relative to the second."""
    far = 0.0
    for part, state in theirs.items():
        for name, value in state.items():
            if torch.is_tensor(value):
                far = max(far, float((ours[part][name] - value).double().norm() / value.double().norm()))
            elif isinstance(value, int | float):
                assert ours[part][name] == value, name
    return far


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_printed_values_and_the_checkpoint_are_those_of_equal_shares(ranks, tmp_path):
    (tmp_path / "equal").mkdir()
    (tmp_path / "shared").mkdir()
    equal = printed_by("reference_script.py", [str(tmp_path / "equal")], ranks)
    printed = run_on_ranks(ranks, reference_script.__file__, tmp_path / "shared", cwd=tmp_path, CHANGING="1")
    shared = [json.loads("{" + each) for line in printed.splitlines() if (each := line.partition("{")[2])]
    assert [list(each) for each in shared] == [list(each) for each in equal]
    own = [[each.pop(OF_ITS_SHARE, None) for each in printed] for printed in (shared, equal)]
    assert own[0] != own[1]  # the shares have changed
    for ours, theirs in zip(shared, equal, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)
    ours, theirs = (torch.load(tmp_path / each / "checkpoint.pth") for each in ("shared", "equal"))
    assert largest_distance(ours, theirs) < 1e-12
