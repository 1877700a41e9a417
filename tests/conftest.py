"""Makes ``import fastar_nodes`` mean this checkout, with or without an installation, and keeps tests to two threads."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]

if "fastar_nodes" not in sys.modules:
    spec = importlib.util.spec_from_file_location(
        "fastar_nodes", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules["fastar_nodes"] = package
    spec.loader.exec_module(package)

torch.set_num_threads(min(2, torch.get_num_threads()))


@pytest.fixture(scope="module")
def one_thread():
    """For networks of a size at which threads only wait for each other, the longer the busier the machine is."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def root() -> Path:
    """The package's folder."""
    return ROOT


@pytest.fixture(scope="session")
def mar_fixtures() -> Path:
    """Reference tensors of MAR; README.md there says what each holds."""
    return ROOT / "tests" / "parity" / "mar"
