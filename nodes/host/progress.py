"""Progress bars, and whether the user cancelled the run."""

from __future__ import annotations

from collections.abc import Callable

import comfy.model_management as mm
from comfy.utils import ProgressBar


def stop_if_cancelled() -> None:
    """Raise ComfyUI's exception if the run was cancelled."""
    mm.throw_exception_if_processing_interrupted()


def callback() -> Callable[[int, int], None]:
    """A callback (done, total) for downloads and other long work; it raises when the run is cancelled."""
    bar = ProgressBar(1)

    def report(done: int, total: int) -> None:
        stop_if_cancelled()

        if total > 0:
            bar.update_absolute(min(done, total), total)

    return report
