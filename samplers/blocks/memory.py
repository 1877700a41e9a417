"""Memory of a generation of blocks, estimated from shapes before anything is allocated: upper bounds, if attention
kernels hold no scores.
"""

from __future__ import annotations

from ...model_loaders.networks.bitdance import BitDanceClass, BlockModel
from ...model_loaders.networks.llama import cache_bytes
from ...model_loaders.networks.ops import unpacking_bytes
from ..conditioning import MaskedCondition, PromptCondition
from ..mar.memory import HEAD, NOISE, TRANSFORMER, weights_by_part
from ..noise import noise_bytes
from .diffusion import BUDGET
from .settings import BlockSettings

# Kept during the whole generation.
CACHE = "KV cache"
POSITIONS = "positions"


def estimate(
    model: BlockModel, condition: MaskedCondition, settings: BlockSettings, edited: bool = False
) -> dict[str, int]:
    """Bytes by stage; the model's weights may be on the meta device.

    Weights by part, ``KV cache``, ``positions`` and ``noise`` are kept during the whole generation; ``transformer`` and
    ``head`` are the working memory of one pass and of one evaluation. See :func:`..mar.memory.total`.

    Args:
        model: network and metadata.
        condition: what the images show.
        settings: of the run.
        edited: whether part of an image is given, so that one pass may feed many blocks.

    Raises:
        UserError: a size that the model does not draw, or a prompt that it cannot read.
    """
    net = model.net
    c = net.config
    height, width = model.grid(settings.height, settings.width, settings.any_size)
    tokens = height * width
    images = len(condition)
    branches = images * (1 + (settings.cfg != 1.0))
    prefix = _prefix(model, condition)
    size = next(net.parameters()).element_size()

    out = weights_by_part(model)
    out[CACHE] = cache_bytes(net, branches * (prefix + tokens))
    # Position rows, and RoPE of all rows, in fp32.
    out[POSITIONS] = 4 * (tokens * c.dim + 2 * (prefix + net.block + tokens) * c.head_dim)
    # As drawn, and in the order of the tokens.
    out[NOISE] = 2 * noise_bytes(images, settings.diffusion_steps, tokens, net.channels)

    # The prefix, a block, or of an edit all blocks in one pass. The values of the MLP, residual stream and norms, and
    # queries with repeated keys and values; the final norm is fp32.
    rows = branches * max(prefix, tokens if edited else net.block)
    numbers = 3 * c.hidden + 6 * c.dim + 6 * c.heads * c.head_dim
    out[TRANSFORMER] = rows * (numbers * size + 8 * c.dim) + unpacking_bytes(model.parts["transformer"])

    # Modulations of many evaluations, those before them, and what they are made of; then the values of the states of
    # a call. With speculation also the states of a window with their drafts, distributions and samples; they are fp32.
    head = net.head_config
    numbers = net.denoiser.modulation_numbers
    rows = branches * net.block
    evaluations = settings.diffusion_steps + 1
    at_once = max(rows * numbers, min(BUDGET, rows * numbers * evaluations))
    states = rows * min(settings.window, evaluations)
    of_a_call = min(states, max(rows, BUDGET // numbers))
    kept = 6 if settings.window == 1 else 16
    out[HEAD] = (3 * at_once + 14 * of_a_call * head.width) * size + 4 * kept * states * head.channels

    return out


def _prefix(model: BlockModel, condition: MaskedCondition) -> int:
    """Rows before the first block, of the longest condition."""
    if isinstance(model.net, BitDanceClass):
        return model.net.config.rows - 1

    assert isinstance(condition, PromptCondition), "a text model"
    longest = max(len(model.prompt(text)) for text in (*condition.texts, ""))
    return longest + 2  # the start of the image, and its height
