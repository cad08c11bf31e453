"""`advise` names the comparison with DDP that is nearest to the recorded cluster."""

import json

import pytest

import paceline as pl
from paceline.clusters.timing.trace import TraceRow
from paceline.experiments.advise.evidence import EVIDENCE, nearest_evidence
from papers.ddp.patterns import PATTERNS
from paths import ROOT


def trace(seconds, interrupted=()):
    """Return a trace of workers with a constant computing time; the work of some was always interrupted."""
    return pl.timing.Trace(
        [
            TraceRow(
                worker=worker,
                draw=draw,
                start_s=draw * own,
                pull_s=0.0,
                compute_s=own,
                push_s=0.0,
                end_s=(draw + 1) * own,
                censored=int(worker in interrupted),
            )
            for worker, own in enumerate(seconds)
            for draw in range(1, 11)
        ]
    )


@pytest.mark.parametrize(
    ("seconds", "pattern"), [([1.0] * 4, "none"), ([1.0, 1.0, 2.0], "half"), ([1.0, 1.0, 1.0, 5.0], "quarter")]
)
def test_the_pattern_is_that_of_the_computing_times(seconds, pattern):
    assert nearest_evidence(trace(seconds)).pattern == pattern


def test_a_worker_that_is_always_interrupted_is_slow():
    assert nearest_evidence(trace([1.0, 1.0, 4.0], interrupted={2})).pattern == "quarter"


def test_the_advice_names_the_page():
    advice = pl.advise(trace([1.0, 1.0, 2.0]), protocols=["bsp"])
    assert advice.evidence.pattern == "half"
    assert "compared with DDP: one worker has half the speed" in str(advice)
    assert "evidence/half" in str(advice)
    assert "There, type k_sync(k=2), or use DDP" in " ".join(str(advice).split())
    typed = json.loads(json.dumps(advice.as_json()))["evidence"]["typed"]
    assert typed == "k_sync(k=2), or use DDP without that worker"


def test_another_cluster_has_not_the_evidence_of_the_recorded_one():
    assert pl.advise(trace([1.0, 1.0, 2.0]), protocols=["bsp"], cluster="3*exp(mean=1)").evidence is None


def test_every_measured_pattern_has_evidence_and_a_page():
    assert list(EVIDENCE) == [name for name, pattern in PATTERNS.items() if not pattern.dies]
    for name in PATTERNS:
        assert (ROOT / f"docs/evidence/{name}.md").is_file()
