"""`paceline protocols`: what it lists can be typed, and fits a terminal."""

import json
import re

from paceline.catalogue.modifiers import ADDITIONS
from paceline.catalogue.parser import PLANS
from paceline.catalogue.protocols import CATALOGUE
from paceline.cli.options import Format
from paceline.cli.protocols import protocols
from paceline.utils.spec_parser import parse_call


def test_every_listed_default_can_be_typed(capsys):
    protocols()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    calls = re.findall(r"^(\w+)(?:\((.*?)\))?\n    [A-Z]", "\n".join(lines).replace(",\n    ", ", "), re.MULTILINE)
    assert [name for name, _ in calls] == [*CATALOGUE, *PLANS, *ADDITIONS]
    for name, knobs in calls:
        given = [knob for knob in knobs.split(", ") if "=" in knob]
        assert len(parse_call(f"{name}({', '.join(given)})").kwargs) == len(given)


def test_the_list_is_also_json(capsys):
    protocols(Format.JSON)
    entries = json.loads(capsys.readouterr().out)
    assert [entry["call"].partition("(")[0] for entry in entries] == [*CATALOGUE, *PLANS, *ADDITIONS]
    assert [entry["kind"] for entry in entries] == [
        *["protocol"] * len(CATALOGUE),
        *["plan"] * len(PLANS),
        *["modifier"] * len(ADDITIONS),
    ]
    assert all(entry["summary"] for entry in entries)
