"""What the metadata services of the clouds answer, and what is made of it."""

import json
import re
from pathlib import Path

import pytest

import paceline as pl
from metadata_server import NAME, preempt
from paceline.clusters.parser import parse_cluster
from paceline.clusters.spot_notice import CLOUDS, Answer, parse_notice
from paceline.engines.notice_watch import FAILURES
from paths import ROOT

PAGE = (ROOT / "docs/how-to/spot-instances.md").read_text(encoding="utf-8")
DEEP = b"[" * 100_000


def look(cloud, *answers):
    """Return what a cloud announces, given its answers in order."""
    left = list(answers)
    found = CLOUDS[cloud].look(lambda method, path, headers: Answer(*left.pop(0)))
    assert not left
    return found


def aws(status, body):
    return "aws", (200, b"token"), (status, body)


def azure(*events, name=None):
    answers = [(200, json.dumps({"DocumentIncarnation": 1, "Events": events}).encode())]
    return ("azure", *answers, *([(200, name.encode())] if name else []))


FOUND = [
    (aws(404, b"<html>"), ""),
    (
        aws(200, b'{"action": "stop", "time": "2017-09-18T08:22:00Z"}'),
        "AWS will stop this machine at 2017-09-18T08:22:00+00:00",
    ),
    (("gcp", (200, b"FALSE")), ""),
    (("gcp", (200, b"TRUE\n")), "Google Cloud preempts this machine"),
    (azure(), ""),
    (azure(preempt(event_type="Freeze")), ""),
    (azure(preempt("worker-8"), name=NAME), ""),
    (
        azure(preempt("worker-8"), preempt(), name=f"{NAME}\n"),
        "Azure preempts this machine at 2016-09-19T18:29:47+00:00",
    ),
    (azure(preempt(not_before=""), name=NAME), "Azure preempts this machine"),
]


@pytest.mark.parametrize(("answers", "text"), FOUND)
def test_a_notice_is_told_from_none(answers, text):
    assert look(*answers) == text


HOSTILE = [
    ("aws", (403, b"no token")),
    ("aws", (200, b"\xff")),
    aws(500, b""),
    aws(200, b""),
    aws(200, b'{"action": "dance", "time": "2017-09-18T08:22:00Z"}'),
    aws(200, b'{"action": "stop", "time": "soon"}'),
    aws(200, b'["stop"]'),
    aws(200, DEEP),
    ("gcp", (404, b"TRUE")),
    ("gcp", (200, b"")),
    ("gcp", (200, b"<html>TRUE</html>")),
    ("azure", (200, b"{}")),
    ("azure", (200, b'{"Events": [{"EventType": "Preempt", "Resources": "worker-7"}]}')),
    ("azure", (200, b'{"Events": ' + DEEP)),
    ("azure", (200, b'{"Events": [], "Other": ' + DEEP)),
    ("azure", (429, b"")),
    azure(preempt(not_before="yesterday"), name=NAME),
    azure(preempt(not_before=f"Mon, 19 Sep {10**20} 18:29:47 GMT"), name=NAME),
]


@pytest.mark.parametrize("answers", HOSTILE)
def test_an_undocumented_answer_is_no_notice_but_an_error(answers):
    with pytest.raises(FAILURES):
        look(*answers)


UNKNOWN = ["", "ibm", "preempt", "aws@", "aws@host", "gcp@a b:80", "azure@h:80:80", "/a\0b"]
BAD_ADDRESSES = ["aws@metadata:80/x", "aws@h:99999", "gcp@h:0"]


@pytest.mark.parametrize("notice", [*UNKNOWN, *BAD_ADDRESSES, "http://169.254.169.254", "file:///run/preempt"])
def test_a_source_that_is_not_known_is_refused(started, notice):
    started()
    expected = r"notice=.*, expected aws, gcp, azure, one of them .* port from 1 to 65535, as .* as /run/preempt"
    with pytest.raises(pl.UsageError, match=expected):
        pl.Torchrun(notice=notice)


def test_a_path_and_another_address():
    assert parse_notice("./preempt") == Path("preempt")
    assert parse_notice("azure@[fd00:ec2::254]:80").address == "[fd00:ec2::254]:80"
    assert parse_notice("azure@[fd00:ec2::254]:80").look is CLOUDS["azure"].look
    assert parse_notice("./aws@host/preempt") == Path("aws@host/preempt")
    assert parse_notice("aws@h:65535").address == "h:65535"


def test_the_command_line_takes_the_documented_text_without_quotes(started):
    started()
    [documented] = set(re.findall(r"`notice=(aws@\S+)`", PAGE))
    notice = documented.replace("HOST:PORT", "127.0.0.1:8080")
    assert parse_cluster(f"torchrun(notice={notice})").notice == notice
    with pytest.raises(pl.UsageError, match=r"as aws@127\.0\.0\.1:8080"):
        parse_cluster("torchrun(notice=http://169.254.169.254)")
