"""Fixtures of the tests of sweeps."""

import os
import sys
from pathlib import Path

import fidelity
import pytest
import torch
from command_line import lab, sentence  # noqa: F401
from command_models import command_files, tiny_demo  # noqa: F401
from tiny_sweeps import table, undisturbed, write_files


@pytest.fixture(scope="session", autouse=True)
def importable(tmp_path_factory):
    """Processes that a test starts import this checkout, installed or not."""
    folder = tmp_path_factory.mktemp("path")
    (folder / "fastar_nodes").symlink_to(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", paths)
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Weight files of tiny models."""
    return write_files(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def whole(files, tmp_path_factory):
    """The lasting files of an undisturbed run."""
    return undisturbed(tmp_path_factory.mktemp("whole"), table(files))


@pytest.fixture(autouse=True)
def settled():
    """The threads of the other tests."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fake_fidelity(monkeypatch):
    """A stand-in for torch-fidelity."""
    monkeypatch.setitem(sys.modules, "torch_fidelity", fidelity.make())
