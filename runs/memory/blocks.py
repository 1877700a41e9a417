"""Memory of a generation of blocks; see ``runs/memory/__init__.py``."""

from __future__ import annotations

from typing import cast

from ...networks.bitdance import BitDanceClass, BlockModel
from ...networks.llama import cache_bytes
from ...networks.ops import unpacking_bytes
from ...samplers.blocks.settings import BlockSettings
from ...samplers.chain import MODULATION_BUDGET
from ...samplers.conditioning import ClassCondition, ClassOrPrompt, PromptCondition
from ...samplers.noise import noise_bytes
from . import HEAD, KV_CACHE, NOISE, POSITIONS, TRANSFORMER, weights_by_part

FP32 = 4  # bytes of a number

# Buffers that live at once, rounded up: tests measure that no run holds more.
#
# For a row of the transformer:
MLP = 3  # of its inner width: both halves of the first layer, and their product
STREAM = 6  # of the model's width: the residual stream, norms, and what is added
ATTENTION = 6  # of all heads: queries, keys and values, and these with RoPE and repeated
FINAL_NORM = 2  # of the model's width, in fp32
# For a token in a call of the diffusion head, of the head's width: the values of a residual block.
BLOCK = 14
# Modulations of the head: those in use, the ones before them, and what they are made of.
MODULATIONS = 3
# For the bits of a token at a diffusion step, in fp32: noise, state, prediction of both branches, mean, next state.
STATE = 6
# And of a drafted step: also the draft, both distributions, their samples, and what is compared.
DRAFTED_STATE = 16


def estimate(
    model: BlockModel, condition: ClassOrPrompt, settings: BlockSettings, edited: bool = False
) -> dict[str, int]:
    """Bytes by stage; the model's weights may be on the meta device.

    Weights by part, ``KV cache``, ``positions`` and ``noise`` are kept during the whole generation; ``transformer`` and
    ``head`` are the working memory of one pass and of one evaluation.

    Args:
        model: network and metadata.
        condition: what the images show.
        settings: of the run.
        edited: whether part of an image is given, so one pass may feed many blocks.
    """
    net = model.net
    c = net.config
    height, width = model.grid(settings.height, settings.width)
    tokens = height * width
    images = len(condition)
    branches = images * (1 + settings.uses_guidance)
    prefix = _prefix(model, condition)
    size = next(net.parameters()).element_size()

    # Kept during the whole generation.
    out = weights_by_part(model)
    out[KV_CACHE] = cache_bytes(net, branches * (prefix + tokens))
    rope_rows = prefix + net.block + tokens
    out[POSITIONS] = FP32 * (tokens * c.dim + 2 * rope_rows * c.head_dim)
    as_drawn_and_in_order = 2
    out[NOISE] = as_drawn_and_in_order * noise_bytes(images, settings.streams(), tokens * net.channels)

    # A pass of the transformer: the prefix, a block, or of an edit all blocks at once.
    rows = branches * max(prefix, tokens if edited else net.block)
    of_a_row = size * (MLP * c.hidden + STREAM * c.dim + ATTENTION * c.heads * c.head_dim) + FP32 * FINAL_NORM * c.dim
    out[TRANSFORMER] = rows * of_a_row + unpacking_bytes(model.parts["transformer"])

    # A block in the diffusion head: modulations of as many evaluations as MODULATION_BUDGET allows, a call, and the
    # states.
    head = net.head_config
    of_a_token = net.denoiser.modulation_numbers
    rows = branches * net.block
    evaluations = settings.diffusion_steps + 1
    modulations = max(rows * of_a_token, min(MODULATION_BUDGET, rows * of_a_token * evaluations))

    states = rows * min(settings.speculation_window, evaluations)
    of_a_call = min(states, max(rows, MODULATION_BUDGET // of_a_token))
    of_a_state = STATE if settings.speculation_window == 1 else DRAFTED_STATE

    out[HEAD] = size * (MODULATIONS * modulations + BLOCK * of_a_call * head.width)
    out[HEAD] += FP32 * of_a_state * states * head.channels
    return out


def _prefix(model: BlockModel, condition: ClassOrPrompt) -> int:
    """Rows before the first block, of the longest condition."""
    if model.condition == ClassCondition.kind:
        return cast(BitDanceClass, model.net).config.rows - 1

    assert isinstance(condition, PromptCondition), "a text model"
    longest = max(len(model.prompt(text)) for text in (*condition.texts, ""))
    return longest + 2  # the start of the image, and its height
