"""Time-lapse: an animated image of tokens being decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from comfy_api.v0_0_2 import io, ui
from torch import Tensor

from ..errors import UserError, first_line
from ..memory import enough_memory
from ..networks.torch_state import in_own_state
from ..reports.record import Report
from ..reports.summary import headline
from ..reports.timelapse import FPS, time_lapse
from ..runs.baseline import qualities
from ..samplers.settings import Settings, knob, settings_from
from . import host
from .compare import SHEET, cell_baselines, cell_names, cells
from .host.images import to_image
from .schema import HIDDEN, REPORT, expect_text, output, schema, widgets

RUNS = 4  # image and report sockets
_PREFIX = "FastAR/time_lapse"


@dataclass(frozen=True)
class TimeLapseSettings(Settings):
    """Widgets of Time-lapse."""

    duration: float = knob(
        4.0,
        "Seconds that the slowest run takes in the animation; the other runs take proportionally less. Usual: 4; a "
        "longer animation shows more of the steps.",
        low=1.0,
        high=10.0,
        step=0.5,
    )


class TimeLapse(io.ComfyNode):
    more = {
        "report_1": "A report from Load Report does not work here.",
        "filename_prefix": "If a program sends the workflow without the editor, use *%year%*, *%month%* and *%day%* "
        "for the date.",
    }
    more_of_outputs = {
        "frames": "To save an MP4 file, set *fps* of Create Video to 12.",
    }

    @classmethod
    def define_schema(cls) -> io.Schema:
        pairs: list[io.Input] = []
        for i in range(1, RUNS + 1):
            image = io.Image.Input(
                f"image_{i}",
                optional=i > 1,
                tooltip="The decoded image or batch of one run.",
            )
            report = REPORT.Input(
                f"report_{i}",
                optional=i > 1,
                tooltip="The report of the sampler that generated the image with the same number. The node reads the "
                "order of the tokens and the seconds of the run from this report.",
            )
            pairs += [image, report]

        filename_prefix = io.String.Input(
            "filename_prefix",
            default=_PREFIX,
            optional=True,
            tooltip="Name of the file in the output folder. FastAR adds a number to the name. If the name contains a "
            "slash, the part before it becomes a folder. As in Save Image, %date:yyyy-MM-dd% stands for the date, and "
            "%Node.widget% for the value of a node's widget.",
        )

        return schema(
            node_id="FastARTimeLapse",
            display_name="Time-lapse",
            category="FastAR/compare",
            description="Makes an animated WebP of up to four runs, in which the tokens appear in the order and at "
            "the speed of each run. The file is saved in the output folder.",
            search_aliases=["animation", "gif", "animated webp", "race", "timelapse", "video"],
            is_output_node=True,
            hidden=HIDDEN,
            sockets=pairs,
            widgets=[filename_prefix, *widgets(TimeLapseSettings)],
            outputs=[
                output(
                    io.Image,
                    "frames",
                    f"All frames, {FPS} per second. Connect the frames to Create Video, and Create Video to Save "
                    "Video.",
                )
            ],
        )

    @classmethod
    @in_own_state
    def execute(
        cls, filename_prefix: Any = _PREFIX, duration: Any = TimeLapseSettings.duration, **inputs: Any
    ) -> io.NodeOutput:
        settings = settings_from(TimeLapseSettings, {"duration": duration})
        prefix = expect_text(filename_prefix, "filename_prefix")
        host.folders.expect_writable(prefix, ".webp", "filename_prefix")

        lists = {name: [value] for name, value in inputs.items()}
        images, reports = cells(lists)
        names = cell_names("", reports)

        with enough_memory(SHEET):
            result = result_of(images, names, reports)
            frames = to_image(time_lapse(images, names, reports, settings.duration, result))
            saved = _save(frames, prefix, cls)
        return io.NodeOutput(frames, ui=saved)


def result_of(images: Sequence[np.ndarray], names: Sequence[str], reports: Sequence[Report | None]) -> str:
    """The result of the runs in one line, as Compare has it; "" of runs that have not one baseline."""
    bases = cell_baselines(0, reports)
    first = bases[0]
    if first is None or len(set(bases)) > 1:
        return ""

    return headline(names, reports, first, qualities(images, reports, bases))


def _save(frames: Tensor, prefix: str, node: Any) -> Any:
    """Save an animation by ComfyUI's helper; a UserError if it cannot be written."""
    try:
        return ui.ImageSaveHelper.get_save_animated_webp_ui(
            frames, prefix, node, fps=FPS, lossless=False, quality=85, method=4
        )
    except (OSError, ValueError) as problem:
        raise UserError(
            f"filename_prefix: the animation cannot be saved as {prefix[:60]!a} ({first_line(problem)}); free disk "
            "space, or give a different name."
        ) from None


NODES: list[type[io.ComfyNode]] = [TimeLapse]
