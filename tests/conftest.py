"""Tests import this checkout as ``fastar_nodes``, installed or not; torch has one thread, and tests that hang end."""

import gc
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from checkout import ROOT
from hypothesis import settings
from timeouts import limited

# What other programs have put into the cache of huggingface-hub is no part of a test.
os.environ["HF_HUB_CACHE"] = str(ROOT / "tests" / "no-huggingface-cache")

torch.set_num_threads(1)  # the networks are small: two threads take as long and more CPU

# The first example of a test also pays for lazy imports, and a busy machine is slow at any of them.
settings.register_profile("fastar", deadline=None)
settings.load_profile("fastar")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked slow
def pytest_collection_modifyitems(items):
    """Apply ``@pytest.mark.fast_cases``: the other cases of the test are slow.

    Its arguments are ids of cases, one number n for the first n cases, or ``every=n`` for the first of every n cases.
    """
    seen = Counter()
    for item in items:
        mark = item.get_closest_marker("fast_cases")
        if mark is None:
            continue

        test = item.nodeid.split("[")[0]
        position = seen[test]
        seen[test] += 1

        if "every" in mark.kwargs:
            fast = position % mark.kwargs["every"] == 0
        elif isinstance(mark.args[0], int):
            fast = position < mark.args[0]
        else:
            fast = item.callspec.id in mark.args
        if not fast:
            item.add_marker("slow")


def pytest_collection_finish():
    """Let the garbage collector leave out all that was imported and collected.

    It lasts to the end, and each search of it takes more than half a second. What the tests make is searched less
    often than usual.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


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
