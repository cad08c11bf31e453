"""`paceline theory`: a table of 80 columns, its notes, curves, JSON, and what it refuses."""

import json
import re
import sys

import pytest

import paceline as pl
from paceline.cli import main

EIGHT = "8*exp(mean=1)"
CONSTANTS = ("--constants", "L=1,c=0.5,sigma2=1,gamma=0.2")


@pytest.fixture
def program(monkeypatch, capsys, tmp_path):
    """Run `paceline theory` in an empty folder; return its status and what it says."""
    monkeypatch.chdir(tmp_path)

    def run(protocols, *arguments, cluster=EIGHT):
        words = ["paceline", "theory", "--cluster", cluster, "--protocols", protocols, *arguments]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        return end.value.code or 0, said.out, said.err

    return run


def test_the_table_has_the_expected_values(program):
    status, out, err = program("bsp, k_async(k=4), asp")
    assert (status, err) == (0, "")
    assert [line.split() for line in out.splitlines()[2:5]] == [
        ["bsp", "2.72", "exact", "0", "1.00", "2.94", "Lemma", "3"],
        ["k_async(k=4)", "0.635", "exact", "1.00", "0.500", "6.30", "Theorem", "2"],
        ["asp", "0.125", "exact", "7.00", "0.125", "8.00", "Lemma", "4"],
    ]


def test_a_protocol_without_k_is_listed_for_every_given_k(program):
    _, out, _ = program("bsp, k_sync, k_batch_async(k=2)", "--k", "2,4")
    assert re.findall(r"^[a-z]\S*", out, re.MULTILINE)[1:] == [
        "bsp",
        "k_sync(k=2)",
        "k_sync(k=4)",
        "k_batch_async(k=2)",
    ]


@pytest.mark.slow
def test_the_widest_table_has_80_columns(program):
    protocols = "k_async(k=100), k_batch_async(k=128), asp"
    _, out, _ = program(protocols, *CONSTANTS, cluster="128*pareto(scale=1,shape=3)")
    assert max(map(len, out.splitlines())) <= 80
    assert "k_batch_async(k=128)" in out
    assert "k_async(k=100): 1.52 to 6.29 s per update; rates are at the bound." in out


def test_protocols_without_theory_are_simulated_with_a_note(program):
    _, out, _ = program("bsp, ssp(lead=2)", "--updates", "500", "--seed", "3")
    found = pl.simulate("ssp(lead=2)", EIGHT, updates=500, seed=3)
    row = out.splitlines()[3].split()
    assert row[:3] == ["ssp(lead=2)", f"{found.seconds_per_update:#.3g}", "-"]
    assert row[-1] == "simulated"
    assert "There is no theory for ssp(lead=2): simulated, 500 updates, seed 3." in out


def test_a_cluster_without_theory_is_simulated_with_one_note(program):
    _, out, _ = program("bsp, asp", "--updates", "50", cluster="2*exp(mean=1) + 2*exp(mean=5)")
    assert out.count("There is no theory for a cluster whose workers differ") == 1


def test_the_best_protocol_at_each_time_is_printed(program):
    _, out, _ = program("bsp, asp", *CONSTANTS, "--eta", "0.1")
    assert re.search(r"Smallest error bound: asp until \d+ s, then bsp\.", out)


@pytest.mark.slow
def test_curves_are_drawn(program, tmp_path):
    status, out, _ = program("bsp, asp", *CONSTANTS, "--seconds", "30", "--out", "curves.svg")
    assert status == 0
    assert out.endswith("Curves written to curves.svg.\n")
    assert "<svg" in (tmp_path / "curves.svg").read_text()
    status, _, err = program("bsp, asp", *CONSTANTS, "--out", "curves.svg")
    assert (status, err) == (2, "paceline: curves.svg exists already; give another file, or --overwrite\n")
    assert program("bsp, asp", *CONSTANTS, "--out", "curves.svg", "--overwrite")[0] == 0


def test_json_has_the_same_numbers(program):
    _, out, _ = program("k_async(k=2), ssp(lead=1)", *CONSTANTS, "--eta", "0.1", "--seconds", "9", "--format", "json")
    told = json.loads(out)
    theory = pl.theory.expected(pl.k_async(2), pl.Cluster(8))
    assert told["protocols"][0]["seconds_per_update"] == theory.seconds_per_update
    assert told["protocols"][0]["fresh_lower"] == 0.25
    assert [row["kind"] for row in told["protocols"]] == ["exact", "simulated"]
    assert list(told["error"]["bounds"]) == ["k_async(k=2)"]
    assert told["error"]["times_s"][-1] == 9


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("k_sync",), "k_sync needs k"),
        (("k_sync", "--k", "two"), "--k 'two', expected whole numbers"),
        (("k_sync", "--k", "9"), "give k <= 8"),
        (("bsp", "--eta", "0.1"), "--eta needs --constants, for example"),
        (("bsp", "--out", "x.svg"), "--out needs --constants, for example"),
        (("bsp", *CONSTANTS, "--out", "x.txt"), "expected a picture: .svg, .png, .pdf"),
        (("bsp", *CONSTANTS, "--out", "no/x.svg"), "there is no folder no"),
        (("bsp", *CONSTANTS, "--eta", "1"), "--eta 1.0, expected a learning rate above 0 and at most 0.5"),
        (("bsp", *CONSTANTS, "--eta", "nan"), "--eta nan is not a number in (0, inf)"),
        (("bsp", *CONSTANTS, "--eta=-1"), "--eta -1.0 is not a number in (0, inf)"),
        (("asp + staleness_lr(C=1)", *CONSTANTS), "there is no error bound with a compensator"),
        (("bsp, bsp", *CONSTANTS), "bsp is given twice"),
        (("bsp", *CONSTANTS, "--seconds", "0"), "--seconds 0.0 is not a number in (0, inf)"),
        (("bsp", "--constants", "L=1,c=2,sigma2=1"), "c=2 is above L=1"),
        (("bsp", "--constants", "L=1,c=0,sigma2=1"), "c=0: there is no bound on the error"),
        (("bsp", "--constants", "L=1"), "constants needs c, sigma2"),
        (("ssp(lead=1)", *CONSTANTS, "--updates", "50"), "none of these protocols has an error bound"),
        (("dbw",), "needs losses and gradients"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(program, arguments, words):
    status, _, err = program(*arguments)
    assert (status, err.count("\n")) == (2, 1)
    assert words in err


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ("local:4", "local:4 runs in real time"),
        ("8*pareto(scale=1,shape=1)", "has an infinite mean"),
    ],
)
def test_invalid_clusters_are_refused_in_one_line(program, cluster, words):
    status, _, err = program("bsp", cluster=cluster)
    assert (status, err.count("\n")) == (2, 1)
    assert words in err
