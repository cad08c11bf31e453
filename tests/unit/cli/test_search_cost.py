"""`paceline search-cost`: what it reads, prints and refuses."""

import json
import sys

import pytest

from paceline.cli import main

HEADER = "run,order,bsp_percent,time_s,accuracy"
ROWS = ["a,BSP,100,100,0.92", "b,BSP,100,100,0.93", "c,BSP->ASP,50,60,0.92", "d,BSP->ASP,50,60,0.9", "e,ASP,0,10,0.5"]
FILE = "\n".join([HEADER, *ROWS])


@pytest.fixture
def program(monkeypatch, capsys, tmp_path):
    """Run `paceline search-cost` on a file with this content; return its status and what it says."""
    monkeypatch.chdir(tmp_path)

    def run(content, *arguments):
        (tmp_path / "runs.csv").write_text(content)
        monkeypatch.setattr(sys, "argv", ["paceline", "search-cost", "runs.csv", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        return end.value.code or 0, said.out, said.err

    return run


def test_the_table_has_the_columns_of_the_paper(program):
    status, out, err = program(FILE, "--settings", "2+2,0+1", "--margin", "0.02")
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert [line.split() for line in out.splitlines()[2:4]] == [
        ["(No,", "2,", "2)", "3.20", "8.00", "1.25", "100.0", "%"],
        ["(Yes,", "0,", "1)", "0.60", "1.50", "1.67", "50.0", "%"],
    ]
    assert "50% is correct and takes 60 s." in out.replace("\n", " ")


def test_fractions_and_percentages_are_accepted_as_settings(program):
    percent = program(FILE, "--settings", "1+1", "--ladder", "50%,0%")[1]
    shares = FILE.replace("bsp_percent", "setting").replace(",100,1", ",1,1").replace(",50,60", ",0.5,60")
    assert percent == program(shares, "--settings", "1+1", "--ladder", "0.5,0")[1]


def test_a_spreadsheet_export_is_read(program):
    spreadsheet = "\N{BYTE ORDER MARK}" + FILE.replace(",", ", ")
    assert program(spreadsheet, "--settings", "1+1") == program(FILE, "--settings", "1+1")


def test_rows_can_be_excluded_and_mapped_to_other_settings(program):
    options = ("--settings", "0+1", "--ladder", "25%", "--stand-in", "25%=50%", "--truth", "25%", "--format", "json")
    complete = json.loads(program(FILE, *options)[1])
    without = json.loads(program(FILE, *options, "--leave-out", "order=SSP,ASP", "--leave-out", "run=d,b")[1])
    assert (complete["target"], without["target"]) == (pytest.approx(0.925), 0.92)
    assert [rung["runs"] for rung in without["ladder"]] == [1, 1]
    assert (complete["settings"][0]["success"], without["settings"][0]["success"]) == (0.5, 1.0)


def test_json_has_every_figure_and_null_for_a_search_that_never_pays_off(program):
    told = json.loads(program(FILE, "--settings", "1+1", "--truth", "100%", "--format", "json")[1])
    [setting] = told["settings"]
    assert (setting["recurring"], setting["bsp_runs"], setting["candidate_runs"]) == (False, 1, 1)
    assert (setting["amortised"], setting["draws"]) == (None, 0)
    assert setting["found"] == [{"setting": 1.0, "probability": 0.5}, {"setting": 0.5, "probability": 0.5}]


def test_simulated_figures_are_marked_with_their_error(program):
    _, out, _ = program(FILE, "--settings", "1+1", "--exact-up-to", "0", "--draws", "400")
    assert out.splitlines()[2].endswith("%~")
    assert "400 searches: standard error at most" in out
    assert max(map(len, out.splitlines())) <= 80


def test_options_for_best_run_two_sides_and_target_change_the_result(program):
    def success(*options):
        return json.loads(program(FILE, "--settings", "0+2", "--format", "json", *options)[1])["settings"][0]["found"]

    assert success("--target", "0.91")[1]["probability"] == 1
    assert success("--target", "0.925")[1]["probability"] == 0
    assert success("--target", "0.925", "--best-alone", "50%")[1]["probability"] == 1
    assert success("--target", "0.88", "--two-sided")[1]["probability"] == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "line 1: column time_s is missing; expected a header with setting (a share) or bsp_percent"),
        (HEADER, "runs.csv has no rows; expected a line for each run"),
        (FILE.replace(",time_s", ",seconds"), "line 1: column time_s is missing"),
        (FILE.replace(",accuracy", ",score"), "line 1: column accuracy is missing"),
        (FILE.replace("bsp_percent", "bsp"), "line 1: column setting or bsp_percent is missing"),
        (FILE.replace("order", "setting"), "setting and bsp_percent both give"),
        (
            FILE.replace("0.93", "93.1"),
            "line 3, column accuracy: 93.1, expected a share from 0 to 1; divide percent by",
        ),
        (FILE.replace("0.93", "-0.1"), "line 3, column accuracy: -0.1, expected a share from 0 to 1"),
        (FILE.replace("0.93", "high"), "line 3, column accuracy: 'high' is not a number"),
        (FILE.replace("0.93", ""), "line 3, column accuracy: '' is not a number"),
        (FILE.replace(",60,", ",0,"), "line 4, column time_s: 0, expected seconds > 0"),
        (FILE.replace(",60,", ",nan,"), "line 4, column time_s: nan, expected seconds > 0"),
        (FILE.replace(",50,", ",150,"), "line 4, column bsp_percent: 150, expected a number from 0 to 100"),
        (
            FILE.replace("bsp_percent", "setting"),
            "line 2, column setting: 100, expected a number from 0 to 1; name the column bsp_percent if these are",
        ),
        (FILE.replace("BSP,100,", "BSP,90,"), "no runs were recorded at 100%"),
        (FILE.replace("0.93", "nan"), "a recorded BSP run diverged (accuracy nan)"),
        (FILE + "\nshort,BSP", "line 7, column time_s: '' is not a number"),
        ("setting,time_s,accuracy\n1,100,0,92", "runs.csv, line 2: more cells than columns in the header"),
    ],
)
def test_a_wrong_file_is_a_one_line_error_with_its_position(program, content, said):
    status, out, err = program(content)
    assert (status, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--settings", "3+1"),
            "the setting has 3 runs at 100%, but only 2 are recorded; give fewer, or use all recorded runs",
        ),
        (("--settings", "5x5"), "'5x5' is not a search setting"),
        (("--ladder", "50"), "'50' is not a share of the workload, for example 25% or 0.25"),
        (("--ladder", "half"), "'half' is not a share of the workload"),
        (("--stand-in", "25%"), "--stand-in '25%', expected SHARE=SHARE"),
        (("--leave-out", "ASP"), "--leave-out 'ASP', expected COLUMN=VALUE,VALUE"),
        (("--leave-out", "odrer=ASP"), "runs.csv has no column 'odrer' for leave_out; it has run, order"),
        (("--leave-out", "order=BSP,BSP->ASP,ASP"), "runs.csv has no rows left"),
        (("--draws", "0"), "--draws 0 is not a whole number"),
    ],
)
def test_wrong_options_are_one_line_errors(program, options, said):
    status, out, err = program(FILE, *options)
    assert (status, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_a_missing_file_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["paceline", "search-cost", "nowhere.csv"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "cannot read the runs in nowhere.csv" in capsys.readouterr().err
