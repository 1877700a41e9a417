"""A tiny random MAR, quick enough for every test."""

import pytest
from fastar_nodes.networks.mar import MARModel
from tiny_models import tiny_mar


@pytest.fixture(scope="session")
def model() -> MARModel:
    return tiny_mar()
