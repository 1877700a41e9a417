"""The node files, imported on a fake ComfyUI."""

import fake_comfy
import pytest
from fastar_nodes.runs import batches

fake_comfy.install()


@pytest.fixture(autouse=True)
def _no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of a run do not depend on the runs before it; test_batches.py has the warm-up."""
    monkeypatch.setattr(batches, "_gains_by_warming", lambda net: False)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    fake_comfy.state.interrupt_at, fake_comfy.state.asked = -1, 0
    fake_comfy.state.loaded.clear()
    fake_comfy.state.upscaled.clear()
    fake_comfy.state.said.clear()
    fake_comfy.state.sent.clear()
    fake_comfy.state.sockets.clear()
    fake_comfy.state.places.clear()
    fake_comfy.Progress.updates.clear()
