"""Sampler nodes, one a sampler of the registry.

The classes hold texts. What they share is in :class:`_Sampler`; how a sampler is run is in ``running``.
"""

from __future__ import annotations

from typing import Any, ClassVar

from comfy_api.latest import io

from ..samplers import presets, registry
from ..samplers.choice import Choice
from ..samplers.conditioning import unknown_words
from ..samplers.mar.settings import CacheSettings
from ..samplers.numbers import own_values
from ..samplers.registry import SAMPLERS
from ..samplers.settings import knobs, make, named
from .running import (
    CachePlan,
    ModelFirst,
    Sockets,
    cache_unlike_preset,
    expect_mar,
    expect_tokens,
    reported,
    run,
    settings_for,
    texts_of,
    unlike_preset,
)
from .schema import (
    CACHE,
    CONDITION,
    HIDDEN,
    MAR,
    PLAIN,
    PRESETS,
    REPORT,
    TOKEN_MODEL,
    checked_preset,
    checked_switch,
    output,
    preset_name,
    preset_widget,
    schema,
    seed_widget,
    setting_widgets,
)


def sampled(vae: str = "the same loader") -> list[io.Output]:
    """Outputs of a sampler; ``vae`` is the loader whose VAE decodes the latent."""
    return [
        output(io.Latent, "latent", f"Decode it with VAE Decode and the vae of {vae}."),
        output(REPORT, "report", "What the sampler did; for Compare, Token Map and Report."),
    ]


_CACHE = CACHE.Input(
    "cache",
    optional=True,
    tooltip="From LazyMAR Cache: reuse most of the transformer's work from step to step. Unconnected: everything is "
    "computed.",
)
_EDIT = [
    io.Latent.Input(
        "latent_image",
        optional=True,
        tooltip="An image to change, from VAE Encode with the vae of the same loader. Needs a mask, here or on the "
        "latent itself.",
    ),
    io.Mask.Input(
        "mask",
        optional=True,
        tooltip="Where the image is sampled again; the rest comes back unchanged. A token is replaced if any of it "
        "is painted over.",
    ),
]
_TOKEN_EDIT = [
    _EDIT[0],
    io.Mask.Input(
        "mask",
        optional=True,
        tooltip="Where the image is drawn again; the tokens of the rest are kept, as the VQ tokenizer reads them. A "
        "new token follows what is above it and to its left, not what is below. It is replaced if any of it is "
        "painted over.",
    ),
]
_MAR_MODEL = "The MAR to sample, from Load MAR, or a Harmon or UniPic from its loader."
_LLAMAGEN_MODEL = (
    "The model to sample: a LlamaGen from Load LlamaGen / PAR, or Load Tar De-tokenizer's or Load Janus' model."
)
_MAR_CONDITION = CONDITION.Input(
    "condition",
    tooltip="What to draw, one entry an image: Class Label for a MAR, Prompt for Harmon and UniPic.",
    lazy=True,
)
_TOKEN_CONDITION = CONDITION.Input(
    "condition",
    tooltip="What to draw, one entry an image: from Class Label; for LlamaGen's text-to-image models from LlamaGen "
    "Prompt; for Janus from Prompt; for Tar's de-tokenizers from Tar Prompt or Image to Codes.",
    lazy=True,
)
_SWITCHED_OFF = {registry.MAR: "plain MAR", registry.LLAMAGEN: "plain decoding, one token after another,"}


class _Sampler(ModelFirst):
    """A sampler of the registry. The classes below hold texts."""

    sampler: ClassVar[str]  # name in the registry
    node_id: ClassVar[str]
    description: ClassVar[str]
    aliases: ClassVar[list[str]]
    models: ClassVar[dict[str, str]] = {"model": _MAR_MODEL}  # sockets with their tooltips
    preset: ClassVar[str | None] = ""  # what its tooltip adds; None for a baseline, which has neither preset nor switch
    vae: ClassVar[str] = "the same loader"  # whose VAE decodes the latent

    @classmethod
    def optional(cls) -> list[io.Input]:
        """Optional sockets."""
        entry = SAMPLERS[cls.sampler]
        if not entry.masked:
            return _TOKEN_EDIT

        has_caches = issubclass(entry.settings, CacheSettings)
        return _EDIT if has_caches else [_CACHE, *_EDIT]

    @classmethod
    def define_schema(cls) -> io.Schema:
        entry = SAMPLERS[cls.sampler]

        # Sockets.
        model = MAR if entry.masked else TOKEN_MODEL
        sockets = [model.Input(name, tooltip=tooltip) for name, tooltip in cls.models.items()]
        sockets.append(_MAR_CONDITION if entry.masked else _TOKEN_CONDITION)

        # Widgets: seed, switch, preset, settings.
        main = [seed_widget()]
        if cls.preset is not None:
            switch = io.Boolean.Input(
                "enabled",
                default=True,
                optional=True,
                tooltip=f"Off runs {_SWITCHED_OFF[entry.family]} with the same seed and settings, the baseline. "
                "Bypassing breaks the graph; use this switch.",
            )
            main.append(switch)

        main.append(preset_widget(cls.options(), cls.preset or ""))
        main += setting_widgets(entry.settings, cls.options())

        return schema(
            node_id=cls.node_id,
            display_name=f"{entry.title} Sampler",
            category="FastAR/sample",
            description=cls.description,
            search_aliases=cls.aliases,
            sockets=sockets,
            widgets=main,
            optional=cls.optional(),
            outputs=sampled(cls.vae),
            hidden=HIDDEN,
        )

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """Of the preset widget."""
        return PLAIN if cls.preset is None else PRESETS

    @classmethod
    def execute(cls, condition: Any, seed: Any, enabled: Any = True, **inputs: Any) -> io.NodeOutput:
        entry = SAMPLERS[cls.sampler]

        # 1. Inputs that are models or sockets; the others are widgets.
        field = "target" if entry.needs_draft else "model"
        expect_loaded = expect_mar if entry.masked else expect_tokens
        loaded = expect_loaded(inputs.pop(field), field)
        draft = inputs.pop("draft", None)
        if entry.needs_draft:
            expect_loaded(draft, "draft")

        optional = {socket.id: inputs.pop(socket.id, None) for socket in cls.optional()}
        sockets = Sockets(condition, draft=draft, **optional)

        # 2. The settings: the numbers that arrived, and those of the preset for what did not.
        asked_preset = inputs.pop("preset", None)
        option = cls.options()[0] if asked_preset is None else checked_preset(asked_preset, cls.options())
        choice = Choice(entry, preset_name(option), inputs)
        settings = settings_for(choice, loaded)

        # 3. What the node says.
        warnings: list[str] = []
        if asked_preset is not None and option != presets.CUSTOM:
            meant = settings_for(Choice(entry, choice.preset), loaded)
            warnings.append(unlike_preset(option, inputs, settings, meant, loaded.model))
        if isinstance(sockets.cache, CachePlan):
            warnings.append(cache_unlike_preset(sockets.cache, loaded, settings))

        if option == presets.CUSTOM:
            differing: dict[str, Any] = {}
            for name, value in loaded.recommended.items():
                if name in inputs and value != inputs[name]:
                    differing[name] = value
            if differing:
                warnings.append(f"This model's file recommends {named(entry.settings, differing)}.")

        # 4. Run; switched off, the plain sampler with the settings that it shares.
        if not checked_switch(enabled, "enabled"):
            entry = SAMPLERS[entry.family]
            shared = {name: value for name, value in vars(settings).items() if name in knobs(entry.settings)}
            settings = make(entry.settings, shared)

        made = run(entry, loaded, settings, seed, sockets)
        unknown = unknown_words(loaded.model, texts_of(condition))
        return reported(cls, made, warnings, unknown, own_values(loaded.model, settings))


class MARSampler(_Sampler):
    sampler = "mar"
    node_id = "FastARMARSampler"
    preset = None
    description = (
        "Plain MAR, as published: at every AR step the transformer predicts a condition per token and a full "
        "diffusion makes each. The baseline that the accelerators are compared with."
    )
    aliases = ["masked autoregressive", "mar", "autoregressive sampler", "baseline sampler", "disa", "inpaint"]


class FastHybridSampler(_Sampler):
    sampler = "fasthybrid"
    node_id = "FastARFastHybridSampler"
    description = (
        "Drafts the tokens of several AR steps in one diffusion pass, checks each draft against its real condition "
        "when its step comes, and refines the accepted ones in a few guided steps (CVPR 2026)."
    )
    aliases = ["fast hybrid", "lookahead", "speculative", "accelerated mar", "fasthybrid"]


class LazyMARSampler(_Sampler):
    sampler = "lazymar"
    node_id = "FastARLazyMARSampler"
    description = (
        "Plain MAR that computes only what changed since the last step: rows of the transformer that hardly move, the "
        "null branch of guidance and most of the diffusion head come from caches (ICCV 2025)."
    )
    aliases = ["lazy mar", "feature cache", "token cache", "condition cache", "accelerated mar"]
    preset = "fast also sets steps, diffusion_steps, diffusion_steps_end and order."


class CSpDSampler(_Sampler):
    sampler = "cspd"
    node_id = "FastARCSpDSampler"
    description = (
        "Continuous speculative decoding: a small MAR drafts the tokens of several AR steps, the target verifies them "
        "together. lossless keeps the target's distribution exactly; published is the paper's code and approximate."
    )
    aliases = ["continuous speculative decoding", "speculative", "draft model", "cspd", "accelerated mar"]
    models = {
        "draft": "A small MAR that drafts tokens, from its own Load MAR; same tokens, grid and classes as the target.",
        "target": "The MAR whose images are wanted; it verifies the drafts.",
    }


class LazyMARCache(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="FastARLazyMARCache",
            display_name="LazyMAR Cache",
            category="FastAR/sample",
            description="LazyMAR's caches for the cache input of MAR, FastHybrid and CSpD Sampler. Use it to combine "
            "LazyMAR with other samplers.",
            search_aliases=["lazy mar", "feature cache", "combine accelerators"],
            widgets=[preset_widget(), *setting_widgets(CacheSettings)],
            outputs=[output(CACHE, "cache", "For the cache input of a MAR sampler.")],
        )

    @classmethod
    def execute(cls, preset: Any = None, **values: Any) -> io.NodeOutput:
        make(CacheSettings, values)  # checks them
        if preset is None:
            return io.NodeOutput(CachePlan(PRESETS[0], values))

        return io.NodeOutput(CachePlan(checked_preset(preset), values, preset_given=True))


class LlamaGenSampler(_Sampler):
    sampler = "llamagen"
    node_id = "FastARLlamaGenSampler"
    preset = None
    description = (
        "Plain LlamaGen, as published: one token after another, row by row. The baseline that PAR and ZipAR are "
        "compared with. Also for Janus and for the codes of Tar."
    )
    aliases = ["llamagen", "tar", "autoregressive sampler", "token sampler", "raster", "baseline sampler"]
    models = {"model": _LLAMAGEN_MODEL}


class PARSampler(_Sampler):
    sampler = "par"
    node_id = "FastARPARSampler"
    preset = None
    description = (
        "Cuts the image into regions and decides one token per region in parallel: distant tokens depend little on "
        "each other (CVPR 2025). Needs a PAR; on a plain LlamaGen it shows the paper's ablations."
    )
    aliases = ["par", "parallelized autoregressive", "parallel decoding", "accelerated llamagen"]
    models = {"model": "The PAR to sample, from Load LlamaGen / PAR; a plain LlamaGen for the ablations of grouping."}


class ZipARSampler(_Sampler):
    sampler = "zipar"
    node_id = "FastARZipARSampler"
    description = (
        "Starts a row as soon as the row above is a window of tokens ahead, so that several rows grow in one pass: "
        "nearby tokens matter most (ICML 2025). Works with any LlamaGen, with Janus and with Tar, untrained."
    )
    aliases = ["zipar", "parallel decoding", "spatial locality", "accelerated llamagen", "accelerated tar"]
    models = {"model": _LLAMAGEN_MODEL}
    preset = "exact is a window of a whole row: plain decoding."


class MuLoSDSampler(_Sampler):
    sampler = "mulosd"
    node_id = "FastARMuLoSDSampler"
    vae = "the target's loader"
    description = (
        "Drafts the image small, enlarges it, checks all of it in one pass of the large model, and resamples only "
        "what is unlikely, with its surroundings, many places at once (CVPR 2026). Lossy: images differ from the "
        "large model's own."
    )
    aliases = ["mulo-sd", "mulosd", "multi-scale", "speculative decoding", "accelerated tar", "accelerated llamagen"]
    models = {
        "target": "The model whose image is wanted: Tar's de-tokenizer of 512 or 1024 pixels from Load Tar "
        "De-tokenizer, or a LlamaGen.",
        "draft": "A model of the same kind and decoder that makes the same image smaller, by half, a third or a "
        "quarter of the side: Tar's de-tokenizer of 256 pixels, usually.",
    }
    preset = (
        "balanced and fast keep 70 and 90 of 100 drafted tokens of full-size models, and on the demo what tau 0.1 "
        "keeps, with wider and narrower windows. exact resamples everything: the target's own image, without a "
        "draft."
    )

    @classmethod
    def optional(cls) -> list[io.Input]:
        upscale_model = io.UpscaleModel.Input(
            "upscale_model",
            optional=True,
            tooltip="Enlarges the draft, from Load Upscale Model; without one it is enlarged bicubically. Sharper "
            "drafts lose fewer tokens. One of the same factor as the two models fits best; any other is brought to "
            "the size.",
        )

        return [upscale_model]


NODES: list[type[io.ComfyNode]] = [
    MARSampler,
    FastHybridSampler,
    LazyMARSampler,
    LazyMARCache,
    CSpDSampler,
    LlamaGenSampler,
    PARSampler,
    ZipARSampler,
    MuLoSDSampler,
]
