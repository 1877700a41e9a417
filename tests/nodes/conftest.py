"""The node files, imported on a fake ComfyUI."""

import fake_comfy
import pytest

fake_comfy.install()

from fastar_nodes.nodes import running  # noqa: E402  on the fake ComfyUI


@pytest.fixture(autouse=True)
def _fresh() -> None:
    fake_comfy.state.interrupt_at, fake_comfy.state.asked = -1, 0
    fake_comfy.state.loaded.clear()
    fake_comfy.state.upscaled.clear()
    fake_comfy.state.said.clear()
    fake_comfy.state.sockets.clear()
    fake_comfy.state.places.clear()
    fake_comfy.Progress.updates.clear()


@pytest.fixture(autouse=True)
def _warm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests count the work of one run: without the untimed beginning of a network's first run, but where they ask."""
    if "cold" not in request.fixturenames:
        monkeypatch.setattr(running, "has_run", lambda net: True)


@pytest.fixture
def cold() -> None:
    """Networks begin their first run untimed, as for users."""
