"""Printed results say the whole reason of an end, in lines of at most 80 columns."""

from pathlib import Path

from paceline.utils.representation import Representation

REASON = "stop perplexity<=1.4: perplexity of version 22 is not finite (nan or infinite), so it cannot reach a bound"


class Account(Representation):
    def _facts(self):
        return {"stopped_by": "not_finite", "reason": REASON}


def test_a_long_reason_is_printed_in_full():
    lines = str(Account()).splitlines()
    assert " ".join(" ".join(lines[2:]).split()) == f"reason {REASON}"
    assert max(map(len, lines)) <= 80


def test_a_folder_whose_name_is_not_utf_8_can_be_printed():
    class Saved(Representation):
        def _facts(self):
            return {"reason": "cannot write caf\udce9", "folder": Path("caf\udce9")}

    for text in (repr(Saved()), str(Saved()), Saved()._repr_html_()):
        assert text.encode().count("caf\ufffd".encode()) == 2


def test_a_line_in_a_console_stays_short():
    assert len(repr(Account())) < 120
