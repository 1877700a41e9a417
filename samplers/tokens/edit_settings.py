"""Settings of image editing with Janus-4o. Each field has a :class:`.Knob`, which holds its tooltip and range."""

from __future__ import annotations

from dataclasses import dataclass

from ..conditioning import USUAL_FREEDOM
from ..settings import Settings, knob

LARGEST_FREEDOM = 10.0


@dataclass(frozen=True)
class EditSettings(Settings):
    """Settings of image editing with Janus-4o."""

    freedom: float = knob(
        USUAL_FREEDOM,
        "How freely the model may change the image; at a higher value, the pixels change more, and only the content of "
        "the image is kept. Usual: 5, as published; at 0, the result stays closest to the pixels, and a third of the "
        "work is saved.",
        low=0.0,
        high=LARGEST_FREEDOM,
        step=0.1,
        symbol="w",
        more="Only Janus-4o uses this setting; for NextStep, set *cfg_img* of NextStep Sampler. With Janus-4o, "
        "guidance runs the model on three versions of the condition, and weights the outputs. The first version has "
        "the content and the VQ tokens of the image (weight 1). The second version has only the content (weight "
        "*freedom*). Guidance moves the result away from the third version, which is empty. *cfg* of the sampler sets "
        "the strength of guidance; the published value is 5.",
    )
