"""Nodes that a newer one replaces, kept so that saved graphs open and run unchanged.

Saved graphs store widget values by position. The newer nodes begin with the preset, and their widgets have the value auto; both would
change what a saved graph means. They therefore have ids of their own, and the nodes here, which are marked as deprecated and left out of
the editor's menus, keep ids, widgets and meaning: the preset, if one is chosen, replaces the values of the widgets. ComfyUI's node
replacement does not serve here: the editor applies it only to nodes that are missing, and only when asked to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from comfy_api.latest import io

from ..assembly import is_demo
from ..samplers import presets
from ..samplers.mar.settings import CacheSettings, CSpDSettings, FastHybridSettings, LazyMARSettings
from ..samplers.registry import SAMPLERS
from ..samplers.settings import knob, make
from ..samplers.tokens.settings import MuLoSDSettings, ZipARSettings
from . import mar_samplers, token_samplers
from .host import Loaded
from .mar_samplers import SOCKETS, expect_mar, run_sampler
from .schema import T, schema, widgets
from .status import reported

_WIDGETS = (io.Int.Input, io.Float.Input, io.Boolean.Input, io.Combo.Input)
_REPLACES = (
    "exact, balanced and fast replace the settings by measured values, the demo's own for the demo and the papers' for full-size "
    "models; the report lists them."
)


def _preset(tooltip: str) -> io.Input:
    return io.Combo.Input(
        "preset",
        options=list(presets.NAMES),
        default=presets.AS_SET,
        advanced=True,
        tooltip=f"as set: the numbers above. {tooltip}",
    )


def _previous(node: type[io.ComfyNode], node_id: str, settings: type, *more: io.Input) -> io.Schema:
    """The schema of a node's previous version: widgets without auto, ``more`` widgets, and the sockets of ``node``."""
    new = node.define_schema()
    widgets_ = [*(i for i in new.inputs if i.id == "seed"), *widgets(settings), *more]
    sockets = [i for i in new.inputs if not isinstance(i, _WIDGETS)]
    required = [i for i in sockets if not i.optional]
    about = {name: getattr(new, name, None) for name in ("display_name", "category", "outputs", "hidden")}
    return schema(
        node_id=node_id,
        **about,
        description=f"{new.description} The previous version of this node, for saved graphs.",
        is_deprecated=True,
        sockets=required,
        widgets=widgets_,
        optional=[i for i in sockets if i.optional],
    )


def _mar(sampler: str, model: Any, inputs: dict[str, Any], field: str = "model", **more: Any) -> io.NodeOutput:
    """Run a MAR sampler; arguments as those of :func:`.mar_samplers.run_sampler`."""
    loaded = expect_mar(model, field)
    values = {k: v for k, v in inputs.items() if k not in SOCKETS}
    settings = _settings(SAMPLERS[sampler].settings, values, loaded)
    return run_sampler(sampler, loaded, settings, inputs, **more)


def _settings(kind: type[T], values: dict[str, Any], loaded: Loaded) -> T:
    """The values of the widgets, and over them those of the preset."""
    preset, config = values.pop("preset", presets.AS_SET), loaded.model.net.config
    width = 0 if kind in (ZipARSettings, MuLoSDSettings) else config.dim
    return presets.apply(make(kind, values), preset, is_demo(loaded.model), width)


class PreviousFastHybrid(io.ComfyNode):
    """FastHybrid."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _previous(mar_samplers.FastHybridSampler, "FastARFastHybrid", FastHybridSettings, _preset(_REPLACES))

    @classmethod
    @reported
    def execute(cls, model: Any, **inputs: Any) -> io.NodeOutput:
        return _mar("fasthybrid", model, inputs)


class PreviousLazyMAR(io.ComfyNode):
    """LazyMAR."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        tooltip = f"{_REPLACES} fast also sets ar_steps, diffusion_steps, diffusion_steps_end and order."
        return _previous(mar_samplers.LazyMARSampler, "FastARLazyMAR", LazyMARSettings, _preset(tooltip))

    @classmethod
    @reported
    def execute(cls, model: Any, **inputs: Any) -> io.NodeOutput:
        return _mar("lazymar", model, inputs, cached=True)


@dataclass(frozen=True)
class PresetFor:
    """The widget of LazyMAR Cache that selects the presets."""

    preset_for: str = knob(
        "demo",
        "Which model the preset is meant for; this node does not see it. Without a preset it changes nothing.",
        choices=("demo", "full size"),
        advanced=True,
    )


class PreviousLazyMARCache(io.ComfyNode):
    """LazyMAR's settings for another sampler."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        more = [_preset(_REPLACES), *widgets(PresetFor)]
        return _previous(mar_samplers.LazyMARCache, "FastARLazyMARCache", CacheSettings, *more)

    @classmethod
    def execute(cls, preset: Any = presets.AS_SET, preset_for: Any = "demo", **values: Any) -> io.NodeOutput:
        demo = make(PresetFor, {"preset_for": preset_for}).preset_for == "demo"
        return io.NodeOutput(presets.apply(make(CacheSettings, values), preset, demo))


class PreviousCSpD(io.ComfyNode):
    """CSpD."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _previous(mar_samplers.CSpDSampler, "FastARCSpD", CSpDSettings, _preset(_REPLACES))

    @classmethod
    @reported
    def execute(cls, draft: Any, target: Any, **inputs: Any) -> io.NodeOutput:
        small = expect_mar(draft, "draft")
        return _mar("cspd", target, inputs, "target", others=[small], draft=small.model)


class PreviousZipAR(io.ComfyNode):
    """ZipAR."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        tooltip = (
            "exact, balanced and fast put other windows in their place, a whole row and then narrower ones; the "
            "report says which. exact is plain LlamaGen."
        )
        return _previous(token_samplers.ZipARSampler, "FastARZipAR", ZipARSettings, _preset(tooltip))

    @classmethod
    @reported
    def execute(cls, model: Any, condition: Any, seed: Any, **values: Any) -> io.NodeOutput:
        loaded = token_samplers.expect_tokens(model, "model")
        settings = _settings(ZipARSettings, values, loaded)
        return token_samplers.run_sampler("zipar", loaded, settings, condition, seed, token_samplers.rows_together)


class PreviousMuLoSD(io.ComfyNode):
    """MuLo-SD."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        tooltip = (
            "balanced and fast keep 70 and 90 of 100 drafted tokens of full-size models instead, and on the demo what tau 0.1 keeps, "
            "with wider and narrower windows; the report says which. exact draws everything again: the target's own picture, without "
            "a draft."
        )
        return _previous(token_samplers.MuLoSDSampler, "FastARMuLoSD", MuLoSDSettings, _preset(tooltip))

    @classmethod
    @reported
    def execute(
        cls, target: Any, draft: Any, condition: Any, seed: Any, upscale_model: Any = None, **values: Any
    ) -> io.NodeOutput:
        large = token_samplers.expect_tokens(target, "target")
        settings = _settings(MuLoSDSettings, values, large)
        return token_samplers.run_mulosd(large, draft, settings, condition, seed, upscale_model)


NODES: list[type[io.ComfyNode]] = [
    PreviousFastHybrid,
    PreviousLazyMAR,
    PreviousLazyMARCache,
    PreviousCSpD,
    PreviousZipAR,
    PreviousMuLoSD,
]
