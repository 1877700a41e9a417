"""The Advisor: which accelerator suits the user's model, device and batch."""

from __future__ import annotations

from typing import Any

import numpy as np
from comfy_api.latest import io

from ..reports.record import Report
from ..samplers.advice import calibrate, candidates
from ..samplers.choice import Choice, choose
from ..samplers.measured import AdviceSettings
from ..samplers.settings import make
from . import host
from .running import ModelFirst, baseline_of, draw_images, expect_pair, warm_up
from .schema import ANY_DRAFT, ANY_SOCKETS, HIDDEN, checked_seed, output, schema, seed_widget, widgets


class Advisor(ModelFirst):
    @classmethod
    def define_schema(cls) -> io.Schema:
        outputs = [
            output(io.String, "sampler", "The answer as text for Any Sampler."),
            output(io.String, "table", "The answer and all candidates as a Markdown table."),
        ]

        return schema(
            node_id="FastARAdvisor",
            display_name="Advisor",
            category="FastAR/compare",
            description="Tries the accelerators that suit the model on your computer and finds the fastest one whose "
            "images stay close enough to the plain sampler's. All use the same seeds.",
            search_aliases=["recommend settings", "calibrate", "auto tune", "which sampler", "fastest"],
            hidden=HIDDEN,
            sockets=ANY_SOCKETS,
            widgets=[*widgets(AdviceSettings), seed_widget()],
            optional=[ANY_DRAFT],
            outputs=outputs,
        )

    @classmethod
    def execute(cls, model: Any, condition: Any, seed: Any, draft: Any = None, **values: Any) -> io.NodeOutput:
        settings = make(AdviceSettings, values)
        first_seed = checked_seed(seed)
        loaded, small = expect_pair(model, draft)

        def draw(choice: Choice, at: int) -> tuple[np.ndarray, Report]:
            return draw_images(choice, loaded, condition, at, small)

        warm_up(loaded, condition)

        # Run by run, the answer last.
        baseline = baseline_of(loaded)
        tried = candidates(baseline, small is not None)
        steps = calibrate(choose(baseline, {}), tried, draw, settings, first_seed)
        while True:
            try:
                done, planned, line = next(steps)
            except StopIteration as end:
                advice = end.value
                break
            host.show(cls, f"run {done + 1} of about {planned}: {line}")

        return io.NodeOutput(advice.best.text, advice.table, ui=host.text_output([advice.sentence]))


NODES: list[type[io.ComfyNode]] = [Advisor]
