"""Tables of the records of a log, written from their classes when the site is built."""

import re
from dataclasses import fields
from inspect import getdoc
from typing import get_args

from paceline.core.events import Arrival, Decision, Measured, Step
from paceline.core.records import DecisionMade, GradientArrived, Record, StepMeasured

PAGE = "reference/file-formats"
PLACE = "<!-- records -->"
ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n {8,}.*)*)", re.MULTILINE)
OF_EVENTS = {DecisionMade: Decision, StepMeasured: Step}


def record_tables():
    """Return a section for each type of record as Markdown; `now_s`, the first field of each, is left out."""
    return "\n".join(line for record in get_args(Record) for line in _section(record))


def _section(record):
    summary, *_ = getdoc(record).partition("\n\n")
    summary = summary.partition("; see")[0].partition(" See")[0].rstrip(".")
    yield from (f"### `{event_name(record)}`", "", f"{summary}.", "")
    yield from ("| Field | Type | Meaning |", "| --- | --- | --- |")
    meanings = field_meanings(record)
    for field in fields(record)[1:]:
        kind = field.type.replace("|", r"\|")
        yield f"| `{field.name}` | `{kind}` | {meanings[field.name].replace('``', '`').replace('|', chr(92) + '|')} |"
    yield ""


def event_name(record):
    """Return the entry ``event`` of the records of a class.

    >>> event_name(GradientArrived)
    'gradient_arrived'
    """
    return re.sub(r"(?<!^)(?=[A-Z])", "_", record.__name__).lower()


def field_meanings(record):
    """Return the description of each field: its own, or that of the event or of a record that has the field too."""
    classes = (GradientArrived, Arrival, Measured, OF_EVENTS.get(record, record), record)
    return {name: " ".join(text.split()) for each in classes for name, text in ATTRIBUTE.findall(getdoc(each))}


def insert_tables(app, page, source):
    """Insert the sections into the page."""
    if page == PAGE:
        source[0] = source[0].replace(PLACE, record_tables())


def setup(app):
    """Register the tables."""
    app.connect("source-read", insert_tables)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
