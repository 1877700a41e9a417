"""Makes ``import fastar_nodes`` load this checkout, installed or not, limits torch to one thread, and ends tests that hang."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from timeouts import limited

ROOT = Path(__file__).resolve().parents[1]

if "fastar_nodes" not in sys.modules:
    spec = importlib.util.spec_from_file_location(
        "fastar_nodes", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules["fastar_nodes"] = package
    spec.loader.exec_module(package)

torch.set_num_threads(1)  # the networks are small: two threads take as long and more CPU

# The first example of a test also pays for lazy imports, and a busy machine is slow at any of them.
settings.register_profile("fastar", deadline=None)
settings.load_profile("fastar")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    with limited():
        return (yield)


pytest_runtest_call = pytest_runtest_teardown = pytest_runtest_setup


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the package."""
    return ROOT


@pytest.fixture(scope="session")
def mar_fixtures() -> Path:
    """Folder of MAR's recorded reference tensors; its README.md describes them."""
    return ROOT / "tests" / "parity" / "mar"
