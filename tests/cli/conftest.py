"""Fixtures of the tests of commands."""

import pytest
from command_line import cli, lab, sentence  # noqa: F401
from command_models import command_files, tiny_demo  # noqa: F401


@pytest.fixture(scope="session")
def files(command_files):  # noqa: F811
    """Weight files of tiny models, one of each kind."""
    return command_files
