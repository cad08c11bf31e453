"""A checkpoint gives back what went in, and is whole or not used."""

import json
import os
from collections import Counter
from math import inf, nan

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import paceline as pl
from paceline.checkpoint.codec import _KNOWN, decode, encode
from paceline.checkpoint.store import LATEST, STATE, SUMS, TENSORS, Checkpoints
from paceline.core.events import Accept, Compute, Minibatch, MinibatchSlice
from paceline.errors import PacelineWarning
from selections import parametrize_few

keys = st.one_of(st.text(), st.integers(), st.booleans())
numbers = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text())
NUMBER = st.none() | st.integers()
slices = st.builds(
    MinibatchSlice,
    worker=st.integers(),
    draw=st.integers(),
    epoch=NUMBER,
    number=NUMBER,
    begin=st.integers(),
    end=st.integers(),
)
minibatches = st.builds(
    Minibatch,
    shard=st.integers(),
    epoch=NUMBER,
    number=NUMBER,
    length=st.integers(),
    slices=st.lists(slices, max_size=2).map(tuple),
    share=st.floats(0.1, 8),
)
plain = st.recursive(
    st.one_of(numbers, minibatches, st.builds(Counter, st.dictionaries(st.integers(), st.integers()))),
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(keys, inner),
        st.sets(st.integers(), max_size=1),  # more have no order to compare by
        st.builds(
            Compute,
            worker=st.integers(),
            version=st.integers(),
            draw=st.integers(),
            minibatch=st.none() | minibatches,
            upcoming=st.lists(minibatches, max_size=2).map(tuple),
        ),
    ),
)


def newest(checkpoints):
    return next((state for _, state in checkpoints.whole()), None)


def there_and_back(value):
    tensors = {}
    return decode(json.loads(json.dumps(encode(value, tensors), allow_nan=False)), tensors)


def same(ours, theirs):
    return type(ours) is type(theirs) and ours == theirs


@given(plain)
def test_state_survives_with_its_types(value):
    assert same(there_and_back(value), value)
    assert repr(there_and_back(value)) == repr(value)


@pytest.mark.parametrize("kind", [kind for kind in _KNOWN.values() if issubclass(kind, tuple)])
@given(st.data())
def test_a_record_is_known_with_all_that_it_may_hold(kind, data):
    value = data.draw(st.from_type(kind))
    assert repr(there_and_back(value)) == repr(value)


@pytest.mark.parametrize(
    "value", [inf, -inf, pl.k_async(k=2), pl.Fault(worker=1, draw=2), {"$tuple": 1}, {"$float": "inf", "a": 2}]
)
def test_state_that_json_cannot_represent(value):
    assert same(there_and_back(value), value)


def test_state_of_tensors_and_arrays():
    shared = torch.arange(6.0)
    value = {
        "a.b": shared,
        "a": {"b": shared[2:4]},
        "c": np.array([[1.5, nan]]),
        "d": np.float32(0.5),
        "e": np.int64(7),
    }
    back = there_and_back(value)
    assert torch.equal(back["a.b"], shared)
    assert torch.equal(back["a"]["b"], shared[2:4])
    assert back["c"].dtype == np.float64
    assert np.array_equal(back["c"], value["c"], equal_nan=True)
    assert (back["d"], back["e"]) == (0.5, 7)


@pytest.mark.parametrize("value", [object(), {"walk": [lambda: 0]}, {1: object()}, nn.Linear(1, 1)])
def test_objects_that_are_not_plain_data_are_refused_with_their_path(value):
    with pytest.raises(pl.UsageError, match=r"^state\S* is a \w+, which a checkpoint cannot hold"):
        encode(value, {})


def store(path, count=3, keep=3):
    checkpoints = Checkpoints(path, keep)
    for version in range(count):
        checkpoints.save(
            version,
            {
                "version": version,
                "held": (Accept(worker=1, draw=version, staleness=0, samples=8),),
                "w": torch.full((5,), 1.0),
            },
        )
    return checkpoints


def test_the_last_few_are_kept_and_the_newest_is_loaded(tmp_path):
    checkpoints = store(tmp_path, count=5)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["000003-update-2", "000004-update-3", "000005-update-4", LATEST]
    assert (tmp_path / LATEST).read_text() == "000005-update-4"
    assert newest(checkpoints)["held"] == (Accept(worker=1, draw=4, staleness=0, samples=8),)


def test_an_empty_store_loads_nothing(tmp_path):
    assert newest(Checkpoints(tmp_path / "none")) is None


def test_an_unfinished_checkpoint_is_ignored(tmp_path):
    checkpoints = store(tmp_path)
    (tmp_path / ".unfinished").mkdir()
    (tmp_path / ".unfinished" / STATE).write_text("{")
    assert newest(checkpoints)["version"] == 2
    checkpoints.save(7, {"version": 7})
    assert newest(checkpoints)["version"] == 7


@parametrize_few("name", [STATE, TENSORS, SUMS], keep=1)
def test_a_flipped_byte_anywhere_is_detected(tmp_path, name):
    checkpoints = store(tmp_path)
    path = tmp_path / "000003-update-2" / name
    whole = path.read_bytes()
    for position in range(0, len(whole), max(1, len(whole) // 40)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.warns(PacelineWarning, match=r"000003-update-2 is damaged .*: the one before it is used"):
            assert newest(checkpoints)["version"] == 1
    path.write_bytes(whole)
    assert newest(checkpoints)["version"] == 2


@pytest.mark.parametrize("name", [STATE, TENSORS, SUMS])
def test_a_missing_file_is_detected(tmp_path, name):
    checkpoints = store(tmp_path)
    (tmp_path / "000003-update-2" / name).unlink()
    with pytest.warns(PacelineWarning, match=f"{name}: No such file"):
        assert newest(checkpoints)["version"] == 1


@pytest.mark.parametrize("latest", [None, "", "000009-update-9", "\0"])
def test_a_missing_pointer_file_is_tolerated(tmp_path, latest):
    checkpoints = store(tmp_path)
    (tmp_path / LATEST).unlink() if latest is None else (tmp_path / LATEST).write_text(latest)
    assert newest(checkpoints)["version"] == 2


@pytest.mark.filterwarnings("ignore:the checkpoint")
def test_damage_everywhere_is_an_error(tmp_path):
    checkpoints = store(tmp_path)
    for sums in tmp_path.glob(f"*/{SUMS}"):
        sums.write_text("")
    with pytest.raises(pl.RunError, match=r"every checkpoint in .* is damaged"):
        newest(checkpoints)


def test_checksums_match_sha256sum(tmp_path):
    store(tmp_path, count=1)
    assert os.system(f"cd {tmp_path}/000001-update-0 && sha256sum --check --quiet --strict {SUMS}") == 0


def test_another_schema_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.checkpoint.store.SCHEMA", 3)
    checkpoints = store(tmp_path)
    monkeypatch.undo()
    with pytest.raises(pl.UsageError, match="has schema 3, this version reads schema 2"):
        newest(checkpoints)


def test_a_failed_write_keeps_the_other_checkpoints(tmp_path, monkeypatch):
    checkpoints = store(tmp_path)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("paceline.checkpoint.store.os.fsync", full)
    with pytest.raises(pl.RunError, match=r"cannot write the checkpoint .*000004-update-9: No space left on device"):
        checkpoints.save(9, {"version": 9})
    assert newest(checkpoints)["version"] == 2


def test_at_least_one_is_kept(tmp_path):
    with pytest.raises(pl.UsageError, match="keep 0 checkpoints"):
        Checkpoints(tmp_path, keep=0)


def test_a_kill_during_the_write_of_the_pointer_is_tolerated(tmp_path):
    checkpoints = store(tmp_path)
    (tmp_path / ".unfinished-latest").write_text("0000")
    checkpoints.save(9, {"version": 9})
    assert newest(checkpoints)["version"] == 9
