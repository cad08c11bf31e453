"""Network and data of the tests of attached loops."""

import pytest

from loop_parts import make_network, numbered_data


@pytest.fixture(scope="module")
def data():
    return numbered_data()


@pytest.fixture(scope="module")
def network():
    return make_network()
