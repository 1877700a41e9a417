"""One real ComfyUI a session. Where there is none these tests are skipped, and the end of the run says so aloud."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from comfy_host import Comfy, Missing, load_workflow


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Minutes: not part of the quick tier."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def comfy() -> Iterator[Comfy]:
    """A server with the pack as its only custom node."""
    try:
        server = Comfy()
    except Missing as problem:
        pytest.skip(f"NOT TESTED IN COMFYUI: {problem}")
    with server:
        yield server


@pytest.fixture(scope="session")
def info(comfy: Comfy) -> dict[str, Any]:
    """/object_info: every node type of the server."""
    return comfy.get("/object_info")


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots and images are kept: $FASTAR_ARTIFACTS, or a temporary folder."""
    named = os.environ.get("FASTAR_ARTIFACTS")
    folder = Path(named).resolve() if named else tmp_path_factory.mktemp("artifacts")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def workflow() -> dict[str, Any]:
    """One of the pack's shared graphs, where one is enough."""
    return load_workflow("07 LazyMAR")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Skips are easily overlooked; these are not."""
    told = {str(r.longrepr[2]) for r in terminalreporter.stats.get("skipped", ()) if isinstance(r.longrepr, tuple)}
    for why in sorted(reason.removeprefix("Skipped: ") for reason in told if "NOT TESTED" in reason):
        terminalreporter.write_line(why, red=True, bold=True)
