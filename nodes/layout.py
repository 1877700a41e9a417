"""Order of every node's widgets.

Saved graphs store widget values by position. A position in this table therefore never changes: append the name of a new widget at the
end of its node's row, and to :data:`LATER`. A node whose order has to change gets a new id; the old one moves to ``nodes/previous.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

_MAR = ("seed", "ar_steps", "diffusion_steps", "cfg")
_MAR_ADVANCED = ("cfg_schedule", "temperature", "order", "t_max")
_LAZY = ("refresh_period", "start_step", "computed_ratio")
_LAZY_ADVANCED = (
    "strategy",
    "condition_cache",
    "token_cache",
    "head_cache",
    "encoder_cache",
    "block",
    "head_period",
)
_TOKENS = ("seed", "cfg", "temperature", "top_k")
_TOKENS_ADVANCED = ("top_p", "cfg_interval")

WIDGETS: dict[str, tuple[str, ...]] = {
    "FastARLoadMAR": ("checkpoint", "decoder", "dtype", "speed"),
    "FastARLoadLlamaGen": ("checkpoint", "decoder", "grid", "dtype", "speed"),
    "FastARLoadHybrid": ("checkpoint", "decoder", "dtype", "size", "speed"),
    "FastARPrompt": ("text", "images", "negative"),
    "FastARLoadTar": ("checkpoint", "dtype"),
    "FastARLoadTarDetokenizer": ("checkpoint", "ta_tok", "decoder", "dtype", "grid", "speed"),
    "FastARClassLabel": ("labels", "label_set", "images_per_label", "add_label"),
    "FastARTextPrompt": ("text", "encoder", "images", "dtype"),
    "FastARTarPrompt": (
        "text",
        "seed",
        "detail",
        "images",
        "temperature",
        "top_p",
        "top_k",
        "repetition_penalty",
        "parallel",
    ),
    "FastARImageToCodes": ("ta_tok", "detail", "images", "dtype"),
    "FastARMARSampler": (
        *_MAR,
        *_MAR_ADVANCED,
        "diffusion_steps_end",
        "diffusion_steps_curve",
        "speculation",
        "reconstruct",
    ),
    "FastARFastHybrid": (
        *_MAR,
        "lookahead",
        "threshold",
        "guided_steps",
        *_MAR_ADVANCED,
        "guidance_schedule",
        "guidance_space",
        "similarity",
        "accepted",
        "verify",
        "preset",
        "diffusion_steps_end",
        "diffusion_steps_curve",
        "reconstruct",
        "lookahead_start",
    ),
    "FastARLazyMAR": (
        *_MAR,
        *_LAZY,
        *_MAR_ADVANCED,
        *_LAZY_ADVANCED,
        "preset",
        "diffusion_steps_end",
        "diffusion_steps_curve",
        "reconstruct",
        "llm_cache",
    ),
    "FastARLazyMARCache": (*_LAZY, *_LAZY_ADVANCED, "preset", "preset_for", "llm_cache"),
    "FastARCSpD": (
        *_MAR,
        "draft_length",
        "prefill_ratio",
        "mode",
        *_MAR_ADVANCED,
        "inner_temperature",
        "alignment",
        "speculation",
        "preset",
        "reconstruct",
    ),
    "FastARLlamaGenSampler": (*_TOKENS, *_TOKENS_ADVANCED, "parallel"),
    "FastARPAR": (*_TOKENS, "grouping", *_TOKENS_ADVANCED, "sequential_start", "group", "parallel"),
    "FastARZipAR": (*_TOKENS, "window", *_TOKENS_ADVANCED, "mask_undecoded", "preset", "parallel"),
    "FastARMuLoSD": (
        *_TOKENS,
        "tau",
        "expansion",
        *_TOKENS_ADVANCED,
        "acceptance_target",
        "neighbours",
        "draft_rows",
        "draft_window",
        "resample_window",
        "resample_order",
        "up_sampler",
        "repair",
        "preset",
        "draft_parallel",
    ),
    # Nodes that begin with the preset. The rows of their previous versions are above.
    "FastARFastHybridSampler": (
        "preset",
        *_MAR,
        "lookahead",
        "threshold",
        "guided_steps",
        "enabled",
        *_MAR_ADVANCED,
        "guidance_schedule",
        "guidance_space",
        "similarity",
        "accepted",
        "verify",
        "diffusion_steps_end",
        "diffusion_steps_curve",
        "reconstruct",
        "lookahead_start",
    ),
    "FastARLazyMARSampler": (
        "preset",
        *_MAR,
        *_LAZY,
        "enabled",
        *_MAR_ADVANCED,
        *_LAZY_ADVANCED,
        "diffusion_steps_end",
        "diffusion_steps_curve",
        "reconstruct",
        "llm_cache",
    ),
    "FastARLazyMARFeatureCache": ("preset", *_LAZY, *_LAZY_ADVANCED, "llm_cache"),
    "FastARCSpDSampler": (
        "preset",
        *_MAR,
        "draft_length",
        "prefill_ratio",
        "mode",
        "enabled",
        *_MAR_ADVANCED,
        "inner_temperature",
        "alignment",
        "speculation",
        "reconstruct",
    ),
    "FastARZipARSampler": (
        "preset",
        *_TOKENS,
        "window",
        "enabled",
        *_TOKENS_ADVANCED,
        "mask_undecoded",
        "parallel",
    ),
    "FastARMuLoSDSampler": (
        "preset",
        *_TOKENS,
        "tau",
        "expansion",
        "enabled",
        *_TOKENS_ADVANCED,
        "acceptance_target",
        "neighbours",
        "draft_rows",
        "draft_window",
        "resample_window",
        "resample_order",
        "up_sampler",
        "repair",
        "draft_parallel",
    ),
    "FastARCompare": ("labels", "columns", "baseline", "differences"),
    "FastARTokenMap": ("what", "opacity"),
    "FastARReport": ("format",),
    "FastARSweep": ("sampler", "settings", "x", "x_values", "y", "y_values", "seeds", "folder"),
    "FastARSweepGrid": ("cell_size",),
    "FastARSweepPlot": ("measure", "folder"),
    "FastARLoadSweepCell": ("folder", "cell", "first", "count"),
    "FastARLoadReport": ("image",),
    "FastARAnySampler": ("sampler", "seed"),
    "FastARAdvisor": ("measure", "least", "repeats", "seed"),
}


# Widgets that were added after a node's first release, at the end of its row. They are optional inputs: prompts in API format that were
# saved before do not have them, and run with their defaults.
LATER: dict[str, tuple[str, ...]] = {
    "FastARLoadMAR": ("speed",),
    "FastARLoadLlamaGen": ("speed",),
    "FastARLoadHybrid": ("speed",),
    "FastARLoadTarDetokenizer": ("speed",),
    "FastARTarPrompt": ("parallel",),
    "FastARMARSampler": ("reconstruct",),
    "FastARFastHybrid": ("diffusion_steps_end", "diffusion_steps_curve", "reconstruct", "lookahead_start"),
    "FastARLazyMAR": ("diffusion_steps_end", "diffusion_steps_curve", "reconstruct", "llm_cache"),
    "FastARLazyMARCache": ("llm_cache",),
    "FastARCSpD": ("reconstruct",),
    "FastARLlamaGenSampler": ("parallel",),
    "FastARPAR": ("parallel",),
    "FastARZipAR": ("parallel",),
    "FastARMuLoSD": ("draft_parallel",),
    "FastARCompare": ("differences",),
    "FastARSweepPlot": ("folder",),
}


class Named(Protocol):
    """A widget."""

    id: str
    optional: bool


W = TypeVar("W", bound=Named)


def ordered(node_id: str, widgets: Iterable[W]) -> list[W]:
    """A node's widgets in saved order. Widgets that are not in the table follow, in the order given. Later ones become optional."""
    row: Sequence[str] = WIDGETS.get(node_id, ())
    place = {name: i for i, name in enumerate(row)}
    out = sorted(widgets, key=lambda widget: place.get(widget.id, len(row)))
    for widget in out:
        widget.optional = widget.optional or widget.id in LATER.get(node_id, ())
    return out
