"""Fixtures of the tests of sweeps."""

from __future__ import annotations

import pytest
import torch
from tiny_sweeps import write_files


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Weight files of tiny models."""
    return write_files(tmp_path_factory.mktemp("weights"))


@pytest.fixture(autouse=True)
def settled():
    """The threads of the other tests."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
