"""Spot notices: how the metadata services of three clouds announce that a machine will be taken away."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from paceline.errors import UsageError

OK, NOT_FOUND = 200, 404
AZURE = {"Metadata": "true"}
ADDRESS = re.compile(r"([\w.-]+|\[[\da-fA-F:]+\]):(\d{1,5})", re.ASCII)


class Answer(NamedTuple):
    """Answer of a metadata service: status and body of HTTP."""

    status: int
    body: bytes


Ask = Callable[[str, str, Mapping[str, str]], Answer]
"""Sends a request: method, path and headers."""


@dataclass(frozen=True)
class MetadataService:
    """Metadata service of a cloud, which a machine reaches without a network.

    Attributes:
        address: host and port.
        look: asks the service, and returns the notice in text; empty without a notice. An answer
            that the cloud does not document is an error.
    """

    address: str
    look: Callable[[Ask], str]


class _AwsAction(msgspec.Struct):
    action: Literal["terminate", "stop", "hibernate"]
    time: datetime


class _AzureEvent(msgspec.Struct, rename="pascal"):
    event_type: str
    resources: list[str] = []
    not_before: str = ""


class _AzureEvents(msgspec.Struct, rename="pascal"):
    events: list[_AzureEvent]


def _look_at_aws(ask: Ask) -> str:
    """Source: Amazon EC2 User Guide, "Spot Instance interruption notices"; two minutes before the end."""
    token = _body(ask("PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"})).decode("ascii")
    answer = ask("GET", "/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
    if answer.status == NOT_FOUND:
        return ""
    found = msgspec.json.decode(_body(answer), type=_AwsAction)
    return f"AWS will {found.action} this machine at {found.time.isoformat()}"


def _look_at_gcp(ask: Ask) -> str:
    """Source: Compute Engine documentation, "Preemptible VM instances"; 30 seconds before the end."""
    answer = ask("GET", "/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    match _body(answer).strip():
        case b"TRUE":
            return "Google Cloud preempts this machine"
        case b"FALSE":
            return ""
    raise ValueError("the answer is neither TRUE nor FALSE")


def _look_at_azure(ask: Ask) -> str:
    """Source: Azure documentation, "Scheduled Events for Linux VMs"; at least 30 seconds before the end."""
    answer = ask("GET", "/metadata/scheduledevents?api-version=2020-07-01", AZURE)
    found = msgspec.json.decode(_body(answer), type=_AzureEvents)
    if preempting := [event for event in found.events if event.event_type == "Preempt"]:
        # The events are those of all machines of a scale set.
        path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
        name = _body(ask("GET", path, AZURE)).decode().strip()
        for event in preempting:
            if name in event.resources:
                at = event.not_before and f" at {parsedate_to_datetime(event.not_before).isoformat()}"
                return f"Azure preempts this machine{at}"
    return ""


def _body(answer: Answer) -> bytes:
    """Return the body of an answer; raise ValueError for another status than 200."""
    if answer.status != OK:
        raise ValueError(f"the answer has status {answer.status}")
    return answer.body


CLOUDS = {
    "aws": MetadataService("169.254.169.254:80", _look_at_aws),
    "gcp": MetadataService("metadata.google.internal:80", _look_at_gcp),
    "azure": MetadataService("169.254.169.254:80", _look_at_azure),
}


def parse_notice(notice: str) -> MetadataService | Path:
    """Return the source of spot notices that a text names: the service of a cloud, or a file.

    >>> parse_notice("aws").address
    '169.254.169.254:80'
    >>> parse_notice("gcp@127.0.0.1:8080").address
    '127.0.0.1:8080'
    >>> parse_notice("/run/preempt").name
    'preempt'

    Raises:
        UsageError: the text names neither.
    """
    name, has_address, address = notice.partition("@")
    if name in CLOUDS:
        if not has_address:
            return CLOUDS[name]
        if _is_address(address):
            return replace(CLOUDS[name], address=address)
    elif "/" in notice and "://" not in notice and "\0" not in notice:
        return Path(notice)
    raise UsageError(
        f"notice={notice!r}, expected {', '.join(CLOUDS)}, one of them with another host and a port from 1 to 65535, "
        "as aws@127.0.0.1:8080, or the path of a file, not a URL, with a slash, as /run/preempt"
    )


def _is_address(text: str) -> bool:
    found = ADDRESS.fullmatch(text)
    return found is not None and 1 <= int(found[2]) <= 65535
