"""Table IV of the Sync-Switch paper, from its authors' runs where they are at hand, and from the kept results."""

import json

import pytest

from papers.sync_switch import costs
from paths import ROOT

PUBLISHED = ROOT.parent / "shared/data/sync_switch/setup1.csv"


def inside_the_bars(line, which):
    relative = all(costs.off(line, which, name) <= 0.01 for name in ("cost", "amortised", "effective"))
    return relative and costs.off(line, which, "success") <= 0.02


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the authors' runs are not here")
def test_every_row_of_table_iv_is_inside_the_bars_and_what_is_kept(tmp_path):
    costs.main([str(PUBLISHED), "--out", str(tmp_path)])
    for name in ("table4.jsonl", "table4.md"):
        assert (tmp_path / name).read_text() == (costs.RESULTS / name).read_text()


def test_the_kept_results_are_inside_the_bars_and_exact():
    lines = [json.loads(line) for line in (costs.RESULTS / "table4.jsonl").read_text().splitlines()]
    assert [line["setting"] for line in lines] == [str(row.setting) for row in costs.TABLE_IV]
    for line in lines:
        assert inside_the_bars(line, "ours")
        assert inside_the_bars(line, "without_misnamed")
        assert line["simulated_draws"] == 0


def test_the_page_holds_the_kept_results():
    page = (costs.RESULTS.parent / "README.md").read_text()
    for line in map(json.loads, (costs.RESULTS / "table4.jsonl").read_text().splitlines()):
        theirs, ours = line["theirs"], line["ours"]
        cells = [f"{theirs[name]:.2f} / {ours[name]:.2f}" for name in ("cost", "amortised", "effective")]
        success = f"{100 * theirs['success']:.1f} / {100 * ours['success']:.1f}"
        assert f"| {line['setting']} | {' | '.join([*cells, success])} |" in page


def test_the_printed_table_is_consistent():
    """What is amortised is the cost over one constant, and effective x cost a whole number of runs."""
    for row in costs.TABLE_IV:
        assert row.cost / row.amortised == pytest.approx(0.805, abs=0.002)
        runs = row.setting.bsp_runs + 4 * row.setting.candidate_runs
        assert row.effective * row.cost == pytest.approx(runs, rel=0.006)
