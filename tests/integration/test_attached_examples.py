"""Examples of attached loops: how many lines differ between two scripts, and the parts of the fine-tuning."""

import difflib
import importlib
import json
import sys

import pytest

from paths import ROOT

ALLOWED = 3  # changed or added lines, beside imports


def text_of(path):
    return (ROOT / "examples" / path).read_text(encoding="utf-8")


def code_of(path):
    """Return the lines after the docstring, without imports and empty lines."""
    lines = text_of(path).splitlines()[1:]
    return [line for line in lines if line and not line.startswith(("import ", "from "))]


@pytest.mark.parametrize(
    "pair", ["plain_loop/{}", "frameworks/accelerate_{}", "frameworks/lightning_{}", "frameworks/transformers_{}"]
)
def test_attaching_changes_three_lines(pair):
    single, attached = (code_of(pair.format(kind) + ".py") for kind in ("single", "attached"))
    changes = list(difflib.ndiff(single, attached))
    assert 1 <= len([line for line in changes if line.startswith("+ ")]) <= ALLOWED


@pytest.fixture
def smollm(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples/finetune_smollm")
    yield importlib.import_module
    for name in ("data", "compare"):
        sys.modules.pop(name, None)


def test_the_fine_tuning_reads_docstrings_and_takes_the_same_sequences_for_a_seed(smollm):
    data = smollm("data")
    found = list(data.docstrings('"Of the module."\nclass C:\n    def f(self):\n        "Of f."\n'))
    assert found == ["Of the module.", "Of f."]
    tokens = [*range(10 * data.LENGTH + 1)]
    first, again, other = (data.sequences(tokens, 5, seed) for seed in (0, 0, 1))
    assert first == again != other
    assert all(len(block) == data.LENGTH and block in [tokens[i:][: data.LENGTH] for i in block[:1]] for block in first)


def test_the_results_of_the_fine_tuning_have_the_layout_of_its_script(smollm):
    compare = smollm("compare")
    text = text_of("finetune_smollm/results.json")
    saved = json.loads(text)
    assert compare.as_text(saved) == text
    assert [*saved] == ["commit", "date", *compare.PACKAGES, "cpu", "cores", "machine", "step_s", "contenders"]
    runs = [run for runs in saved["contenders"].values() for run in runs]
    assert all(loss == round(loss, compare.LOSS_DIGITS) for run in runs for _, loss in run["curve"])
    assert compare.table(saved["contenders"]) in text_of("finetune_smollm/README.md")


def test_the_time_to_a_loss_is_interpolated_and_missing_where_it_is_not_reached(smollm):
    compare = smollm("compare")
    curve = [(0.0, 3.0), (10.0, 2.0), (20.0, 1.0)]
    assert compare.time_to(curve, 1.5) == 15.0
    assert compare.time_to(curve, 0.5) is None
    runs = {
        "DDP": [{"to_target_s": 30.0, "final_loss": 1.0}],
        "fast": [{"to_target_s": 15.0, "final_loss": 1.25}],
        "never": [{"to_target_s": None, "final_loss": 2.0}],
    }
    _, _, ddp, fast, never = compare.table(runs).splitlines()
    assert ddp == "| DDP | 30 | 1.00 (1.00 to 1.00) | 1.000 |"
    assert fast == "| fast | 15 | 2.00 (2.00 to 2.00) | 1.250 |"
    assert never == "| never | 1 of 1 did not reach it | | 2.000 |"
