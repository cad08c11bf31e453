"""Fixtures of groups of ranks."""

import pytest

from paceline.engines.distributed.rendezvous.rendezvous import Rendezvous
from paceline.engines.distributed.transport.transport import GlooTransport


@pytest.fixture
def rendezvous():
    return Rendezvous(*GlooTransport(5.0).listen("127.0.0.1"))
