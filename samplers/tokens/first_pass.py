"""The first pass of a schedule, the prefill: the transformer reads the condition, and predicts the first cells."""

from __future__ import annotations

import numpy as np

from ...networks.torch_state import to_device
from .canvas import TokenCanvas
from .looks import CachedTransformer
from .sampling import TokenDraw
from .schedule import Schedule


def run_first_pass(
    canvas: TokenCanvas, transformer: CachedTransformer, draw: TokenDraw, schedule: Schedule, slots: int, null: bool
) -> None:
    """Run the prefill, and decide the cells of the first pass of a schedule. The hidden row of the condition's last
    token predicts all these cells.

    Args:
        canvas: the images to generate.
        transformer: gets a cache with ``slots`` image slots.
        draw: samples the tokens.
        schedule: a schedule without known cells.
        slots: number of image slots of the cache.
        null: whether the transformer also reads the null condition. If False, no later pass can feed the null branch.
    """
    looking, drawing = canvas.phases
    cells = to_device(np.array(schedule.passes[0].cells, np.int64), canvas.device)
    with canvas.clock.phase(looking):
        hidden = transformer.prefill(null, slots)
    with canvas.clock.phase(drawing):
        tokens = draw.of_schedule(schedule)(0, cells, hidden.expand(-1, len(cells), -1))
    canvas.decide(cells, tokens, 0)
