"""Sampler nodes, one a sampler of the registry, and what runs a sampler for the other nodes.

A run checks its inputs, makes room on the device and drives one generator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar

import numpy as np
from comfy_api.latest import io
from torch import Tensor, nn

from ..assembly import DEMO_LABELS, expect_same_codes
from ..errors import UserError
from ..memory import enough_memory
from ..model_loaders.networks.autoencoder import VQModel
from ..model_loaders.networks.llama import TokenModel
from ..model_loaders.networks.mar import MARModel
from ..reports.exchange import add_runs, described
from ..reports.record import Baseline, Qualities, Report
from ..reports.summary import no_gain, one_line
from ..samplers import presets, registry
from ..samplers.batches import in_parts, run_beginning, short
from ..samplers.choice import Choice, choose
from ..samplers.conditioning import (
    AnyCondition,
    CodeCondition,
    FeatureCondition,
    MaskedCondition,
    PromptCondition,
    expect_null_prompt,
    unknown_words,
)
from ..samplers.editing import Edit
from ..samplers.mar.lazymar import LazyTransformer
from ..samplers.mar.memory import DECODE, WEIGHTS, estimate, expect_little_noise
from ..samplers.mar.settings import CacheSettings
from ..samplers.noise import PairedNoise
from ..samplers.registry import SAMPLERS, Entry
from ..samplers.settings import knobs, make, named
from ..samplers.tokens import memory as token_memory
from ..samplers.tokens.conditioning import features_of
from ..samplers.tokens.draws import PairedDraws
from ..samplers.tokens.loop import resolve
from ..samplers.tokens.upsampling import UpSampling
from . import host
from .conditioning import READING, LabelText, ModelFirst, as_labels
from .loaders import TA_TOK
from .schema import (
    CACHE,
    HIDDEN,
    MAR,
    MAR_CONDITION,
    PLAIN,
    PRESETS,
    REPORT,
    TOKEN_CONDITION,
    TOKEN_MODEL,
    checked_seed,
    checked_switch,
    chosen,
    describe,
    expect,
    expect_latents,
    expect_mask,
    expect_model,
    expect_usual_size,
    output,
    preset_widget,
    schema,
    seed_widget,
    widgets,
)

MAR_LOADERS = "Load MAR or Load Harmon / UniPic"
TOKEN_LOADERS = "Load LlamaGen / PAR, Load Tar De-tokenizer or Load Janus"
CONDITIONS = "Class Label, Prompt, Text Prompt (LlamaGen), Tar Prompt or Image to Codes"
# Upper estimate of a TA-Tok's activations for the codes of one picture; pictures are read one at a time.
_READER_BYTES = 256 << 20
# Pixels that pass through the decoder at once when a draft is enlarged.
_PIXELS = 1 << 21
# Samplers that run here: all but the comparison that needs a codebook, and the second name of LlamaGen.
RUNNABLE = {name: entry for name, entry in SAMPLERS.items() if name != registry.TAR}


def expect_mar(value: Any, field: str) -> host.Loaded:
    """Check that a socket holds a MAR, Harmon or UniPic."""
    return expect_model(value, host.Loaded, MARModel, field, MAR_LOADERS)


def expect_tokens(value: Any, field: str) -> host.Loaded:
    """Check that a socket holds a token model with its decoder."""
    loaded = expect_model(value, host.Loaded, TokenModel, field, TOKEN_LOADERS)
    if loaded.vae is None:
        raise UserError(f"{field}: it came without its decoder; connect the output of {TOKEN_LOADERS}.")
    return loaded


def expect_any(value: Any, field: str) -> host.Loaded:
    """Check that a socket holds a MAR, or a token model with its decoder."""
    loaded = expect(value, host.Loaded, field, f"{MAR_LOADERS}, {TOKEN_LOADERS}")
    return expect_tokens(loaded, field) if isinstance(loaded.model, TokenModel) else expect_mar(loaded, field)


def expect_pair(model: Any, draft: Any) -> tuple[host.Loaded, host.Loaded | None]:
    """The model and the optional draft model of a node that runs any sampler."""
    return expect_any(model, "model"), None if draft is None else expect_any(draft, "draft")


def baseline_of(loaded: host.Loaded) -> str:
    """Name of the plain sampler of a model; of a PAR, the sampler that it was trained for."""
    if isinstance(loaded.model, MARModel):
        return registry.MAR
    return "par" if loaded.model.net.config.special > 0 else registry.LLAMAGEN


def baseline_choice(choice: Choice, loaded: host.Loaded) -> Choice:
    """The plain sampler of a model with the settings that it shares with a choice."""
    plain = SAMPLERS[baseline_of(loaded)]
    return Choice(plain, values={k: v for k, v in choice.values.items() if k in knobs(plain.settings)})


def settings_for(choice: Choice, loaded: host.Loaded) -> Any:
    """The settings of a choice on a model: its values, the preset's, the file's recommendations, the defaults."""
    return choice.settings(loaded.recommended, loaded.model.label_set == DEMO_LABELS, _width(loaded))


def _width(loaded: host.Loaded) -> int:
    """Width of a MAR's transformer, by which papers state values; else 0."""
    return loaded.model.net.config.dim if isinstance(loaded.model, MARModel) else 0


def check(choice: Choice, loaded: host.Loaded, draft: Any) -> None:
    """Check that a sampler runs here, suits the model and has its draft model."""
    entry = choice.entry
    if entry.name not in RUNNABLE:
        raise UserError(f"sampler: {entry.name} does not run here; choose one of {', '.join(RUNNABLE)}.")
    if isinstance(loaded.model, MARModel) != entry.masked:
        raise UserError(
            f"sampler: {entry.name} samples {entry.models}, and {loaded.model.name} is none; choose another."
        )
    if entry.needs_draft and draft is None:
        raise UserError(f"draft: {entry.name} needs a draft model; connect one of the same family.")


def run_choice(choice: Choice, loaded: host.Loaded, condition: Any, seed: Any, draft: Any = None) -> io.NodeOutput:
    """Run a sampler on the values of sockets; ``loaded`` was checked by :func:`expect_any`."""
    check(choice, loaded, draft)
    return run(choice.entry, loaded, settings_for(choice, loaded), condition, seed, draft=draft)


def draw_pictures(
    choice: Choice, loaded: host.Loaded, condition: Any, seed: int, draft: Any = None
) -> tuple[np.ndarray, Report]:
    """Pictures uint8 [N, H, W, 3] and the report of :func:`run_choice`."""
    latent, report = run_choice(choice, loaded, condition, seed, draft).result
    assert loaded.vae is not None
    return host.to_bytes(loaded.vae.decode(latent["samples"])), report


def warm_up(loaded: host.Loaded, condition: Any) -> None:
    """Begin the plain sampler, untimed, as :func:`samplers.batches.warm_up`."""
    plain = choose(baseline_of(loaded), {})
    steps, _ = _begin(plain.entry, loaded, short(plain.entry, settings_for(plain, loaded)), condition, 0)
    run_beginning(steps)


def run(entry: Entry, loaded: host.Loaded, settings: Any, condition: Any, seed: Any, **sockets: Any) -> io.NodeOutput:
    """Run a sampler with progress, preview and cancellation, to the latent and the report.

    Args:
        loaded: a model of the sampler's family, checked.
        sockets: values of optional inputs by name: draft; cache, latent and mask of a MAR; upscale_model of MuLo-SD.
    """
    steps, latents = _begin(entry, loaded, settings, condition, checked_seed(seed), **sockets)
    done = host.drive(steps, loaded.vae, latents)
    done.report.prompt = host.prompt_id()
    with enough_memory(READING):
        made = host.to_output(latents(done))
    if entry.masked and loaded.vae is not None:
        done.report.memory[DECODE] = int(loaded.vae.memory_used_decode(made.shape, loaded.vae.vae_dtype))
    return io.NodeOutput({"samples": host.mark(made, host.KL if entry.masked else host.VQ)}, done.report)


def reported(node: Any, output: io.NodeOutput, advice: str = "") -> io.NodeOutput:
    """Write a sampler's report, the second output, to saved pictures; returns ``output``.

    The settings used are shown on the node, ``advice`` under them, and the report unless another node takes it: Compare then shows it
    beside the others.
    """
    report: Report = output.result[1]
    figures = [] if host.taken(node, 1) else [one_line(report), no_gain(report)]
    used = named(registry.find(report.sampler).settings, report.settings)
    host.show(node, [f"{used}.", advice, *figures])
    write_reports(node, [report])
    return output


def write_reports(
    node: Any,
    reports: Sequence[Report],
    labels: Sequence[str] = (),
    baseline: Baseline | None = None,
    quality: Qualities = (),
) -> None:
    """Add reports to the metadata that core's Save Image writes to the PNG files of this run.

    ComfyUI gives every node of a run the same dictionary. A run whose pictures are queued without a workflow has none.
    """
    metadata = host.hidden(node, "extra_pnginfo")
    if isinstance(metadata, dict):
        add_runs(metadata, described(reports, str(host.hidden(node, "unique_id") or ""), labels, baseline, quality))


def _begin(entry: Entry, *args: Any, **sockets: Any) -> tuple[Any, Callable[[Any], Tensor]]:
    """Check the inputs of a run and make room for it; returns its steps, and from a step, or the result, to latents [B, C, h, w]."""
    return (_begin_mar if entry.masked else _begin_tokens)(entry, *args, **sockets)


@dataclass(frozen=True)
class CachePlan:
    """Value of a cache socket: the preset of LazyMAR Cache and its values, which depend on the model that is sampled."""

    preset: str
    values: Mapping[str, Any]


def _begin_mar(
    entry: Entry, loaded: host.Loaded, settings: Any, condition: Any, seed: int, **sockets: Any
) -> tuple[Any, Callable[[Any], Tensor]]:
    model: MARModel = loaded.model
    what = _mar_condition(condition, model)
    images, steps = len(what), settings.diffusion_steps
    edit, cache = _edit_of(sockets, host.KL, "Load MAR"), sockets.get("cache")
    expect_little_noise(model, images, steps, "condition")
    small = [expect_mar(sockets["draft"], "draft")] if entry.needs_draft else []
    more = {"draft": small[0].model} if small else {}
    if isinstance(cache, CachePlan):
        of = (model.label_set == DEMO_LABELS, model.net.config.dim, settings.ar_steps)
        cache = presets.combine(CacheSettings, {}, cache.preset, cache.values, *of)
    if cache is not None:
        expect(cache, CacheSettings, "cache", "LazyMAR Cache")
    c, patch = model.net.config, model.patch
    shape = (images, c.channels // patch**2, c.grid * patch, c.grid * patch)
    memory = estimate(model, what, settings, settings if isinstance(settings, CacheSettings) else cache)
    # All but the weights. The stages are added, because allocators reuse little between them.
    host.to_device(loaded, sum(v for name, v in memory.items() if not name.startswith(WEIGHTS)), shape, small)

    def start(part: range) -> Any:
        own = {} if cache is None else {"transformer": LazyTransformer(cache)}
        area = None if edit is None else edit.of(part) if len(part) < images else edit
        return entry.run(model, what.of(part), settings, PairedNoise(seed, part), seed, edit=area, **more, **own)

    return in_parts(start, images), attrgetter("latents")


def _mar_condition(value: Any, model: MARModel) -> MaskedCondition:
    """The condition on the socket, of the kind that the model reads."""
    if model.condition == PromptCondition.kind:
        return expect(value, PromptCondition, "condition", "Prompt")
    return as_labels(value, model.label_set)


def _edit_of(sockets: Mapping[str, Any], kind: str, loader: str) -> Edit | None:
    """The edit of the two optional sockets, None if both are unconnected; ``kind`` of latents, as ``loader``'s vae makes them."""
    latent, mask = sockets.get("latent"), sockets.get("mask")
    if latent is None and mask is None:
        return None
    if latent is None:
        raise UserError(
            "latent: there is a mask but no picture to change; connect VAE Encode's output, or remove the mask."
        )
    if not isinstance(latent, dict) or "samples" not in latent:
        raise UserError(f"latent: it got {describe(latent)}; connect the output of VAE Encode.")
    if host.kind_of(latent["samples"]) not in ("", kind):
        raise UserError(
            f"latent: it is of another family, which has other latents; connect VAE Encode with the vae of {loader}."
        )
    mask = latent.get("noise_mask") if mask is None else mask
    if mask is None:
        raise UserError("mask: without one nothing of the latent would be kept; paint a mask, or remove the latent.")
    start = expect_latents(latent["samples"], "latent")
    expect_usual_size(start, "latent")
    return Edit(start, expect_mask(mask, "mask"))


def _begin_tokens(
    entry: Entry, loaded: host.Loaded, settings: Any, condition: Any, seed: int, **sockets: Any
) -> tuple[Any, Callable[[Any], Tensor]]:
    model: TokenModel = loaded.model
    vae, upscale_model = loaded.vae, sockets.get("upscale_model") if entry.needs_draft else None
    assert vae is not None  # checked by expect_tokens
    if entry.name == "par" and model.net.config.condition == "features":
        raise UserError(
            f"model: {model.name} is a Tar de-tokenizer, which decides its tokens row by row; connect a PAR, or use LlamaGen Sampler or "
            "ZipAR Sampler."
        )
    edit = _edit_of(sockets, host.VQ, "the model's loader")
    what, settings = _token_condition(condition, loaded), resolve(settings, model)
    small = expect_tokens(sockets["draft"], "draft") if entry.needs_draft else None
    if small is not None:
        expect_same_codes(_vq(loaded), _vq(small), model.name)
    if upscale_model is not None and not _is_upscale_model(upscale_model):
        raise UserError(
            f"upscale_model: it got {describe(upscale_model)}; connect the output of Load Upscale Model, of one for colour pictures."
        )
    what, images, more = _with_features(what, loaded), len(what), dict[str, Any]()
    work, others = token_memory.estimate(model, what, settings, small.model if small else None), list[Any]()
    if small is not None:
        others = [small, vae]
        pixels = model.grid * vae.downscale_ratio
        part = max(1, min(images, _PIXELS // pixels**2))
        work += part * vae.memory_used_encode((1, 3, pixels, pixels), vae.vae_dtype)
    place = partial(host.to_device, loaded, work, (images, vae.latent_channels, model.grid, model.grid), others)
    if small is not None:
        # Core's node may unload the models to make room for its own.
        enlarge = None if upscale_model is None else host.upscaler(upscale_model, place)
        up = UpSampling(_vq(loaded), enlarge, "bicubic" if upscale_model is None else _name_of(upscale_model))
        more = {"draft": small.model, "up_sampler": up}
    place()

    if edit is not None:
        edit = _codes_of(edit, loaded)

    def start(part: range) -> Any:
        own = more if edit is None else {"edit": edit.of(part) if len(part) < images else edit}
        return entry.run(model, what.of(part), settings, PairedDraws(seed, part), seed, **own)

    return in_parts(start, images), lambda step: _vectors(vae, step.codes)


def _token_condition(value: Any, loaded: host.Loaded) -> AnyCondition:
    """Check that a socket holds a condition; the sampler checks that it fits the model."""
    if isinstance(value, LabelText):
        return as_labels(value, loaded.model.label_set)
    if isinstance(value, PromptCondition):
        expect_null_prompt(value, loaded.model.name)
    if isinstance(value, AnyCondition):
        return value
    raise UserError(f"condition: it got {describe(value)}; connect the output of {CONDITIONS}.")


def _with_features(condition: AnyCondition, loaded: host.Loaded) -> AnyCondition:
    """Turn semantic codes into features with the model's TA-Tok, which is on the device only for that."""
    if not isinstance(condition, CodeCondition) or TA_TOK not in loaded.parts:
        return condition
    reader = loaded.parts[TA_TOK]
    host.load_to_device(reader, _READER_BYTES)
    with enough_memory(READING):
        made = features_of(condition, reader.model)
    return FeatureCondition(tuple(rows.to(host.device()) for rows in made.features), made.names)


def _codes_of(edit: Edit, loaded: host.Loaded) -> Edit:
    """The edit with codes in the place of latents."""
    net, latents = _vq(loaded).net, edit.start
    table = net.quantize.embedding.weight
    if latents.shape[1] != table.shape[1]:
        raise UserError(
            f"latent: it has the shape {list(latents.shape)}, the model makes {table.shape[1]} channels; connect VAE Encode with the vae "
            "of the same loader."
        )
    return Edit(net.codes(latents.to(table.device)).cpu(), edit.mask.cpu())


def _vq(loaded: host.Loaded) -> VQModel:
    assert loaded.vae is not None
    return VQModel(loaded.vae.first_stage_model, loaded.vae.name)


def _vectors(vae: host.FastARVAE, codes: Tensor) -> Tensor:
    """Code vectors, as a LATENT, on the device of the codebook."""
    return vae.first_stage_model.vectors(codes.to(vae.first_stage_model.quantize.embedding.weight.device))


def _is_upscale_model(value: Any) -> bool:
    """Whether a value is an UPSCALE_MODEL for colour pictures."""
    scale = getattr(value, "scale", None)
    colours = {getattr(value, name, 3) for name in ("input_channels", "output_channels")}
    works = callable(value) and isinstance(getattr(value, "model", None), nn.Module)
    return works and isinstance(scale, (int, float)) and scale > 0 and colours == {3}


def _name_of(upscale_model: Any) -> str:
    kind = getattr(getattr(upscale_model, "architecture", None), "name", None) or type(upscale_model.model).__name__
    return f"{kind} x{upscale_model.scale:g}"


def sampled(vae: str = "the same loader") -> list[io.Output]:
    """Outputs of a sampler; ``vae`` is the loader whose VAE decodes the latent."""
    return [
        output(io.Latent, "latent", f"Decode it with VAE Decode and the vae of {vae}."),
        output(REPORT, "report", "What the sampler did; for Compare, Token Map and Report."),
    ]


_CACHE = CACHE.Input(
    "cache",
    optional=True,
    tooltip="From LazyMAR Cache: reuse most of the transformer's work from step to step. Unconnected: everything is computed.",
)
_EDIT = [
    io.Latent.Input(
        "latent",
        optional=True,
        tooltip="A picture to change, from VAE Encode with the vae of the same loader. Needs a mask, here or on the latent itself.",
    ),
    io.Mask.Input(
        "mask",
        optional=True,
        tooltip="Where the picture is sampled again; the rest comes back unchanged. A token is replaced if any of it is painted over.",
    ),
]
_TOKEN_EDIT = [
    _EDIT[0],
    io.Mask.Input(
        "mask",
        optional=True,
        tooltip="Where the picture is drawn again; the tokens of the rest are kept, as the VQ tokenizer reads them. A new token follows "
        "what is above it and to its left, not what is below. It is replaced if any of it is painted over.",
    ),
]
_MAR_MODEL = "The MAR to sample, from Load MAR, or a Harmon or UniPic from its loader."
_LLAMAGEN_MODEL = (
    "The model to sample: a LlamaGen from Load LlamaGen / PAR, or Load Tar De-tokenizer's or Load Janus' model."
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
        return _EDIT if issubclass(entry.settings, CacheSettings) else [_CACHE, *_EDIT]

    @classmethod
    def define_schema(cls) -> io.Schema:
        entry = SAMPLERS[cls.sampler]
        if entry.masked:
            model, condition = MAR, MAR_CONDITION
            what = "What to draw, one entry an image: Class Label for a MAR, Prompt for Harmon and UniPic."
        else:
            model, condition = TOKEN_MODEL, TOKEN_CONDITION
            what = (
                "What to draw, one entry an image: from Class Label; for LlamaGen's text-to-image models from Text Prompt (LlamaGen); for "
                "Janus from Prompt; for Tar's de-tokenizers from Tar Prompt or Image to Codes."
            )
        settings = widgets(entry.settings)
        # Not a part of the preset: it changes no picture.
        parallel = [widget for widget in settings if widget.id == "parallel"]
        opened = [widget for widget in settings if widget not in parallel]
        main = [seed_widget(), preset_widget(opened, cls.options(), cls.preset or ""), *parallel]
        if cls.preset is not None:
            about = f"Off runs {_SWITCHED_OFF[entry.family]} with the same seed and settings, the baseline. Bypassing breaks the graph; "
            main.insert(1, io.Boolean.Input("enabled", default=True, tooltip=f"{about}use this switch."))
        return schema(
            node_id=cls.node_id,
            display_name=f"{entry.title} Sampler",
            category="FastAR/sample",
            description=cls.description,
            search_aliases=cls.aliases,
            sockets=[
                *(model.Input(name, tooltip=tooltip) for name, tooltip in cls.models.items()),
                condition.Input("condition", tooltip=what, lazy=True),
            ],
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
    def execute(
        cls, condition: Any, seed: Any, preset: Any = None, enabled: Any = True, **inputs: Any
    ) -> io.NodeOutput:
        entry = SAMPLERS[cls.sampler]
        field = "target" if entry.needs_draft else "model"
        expect_model_ = expect_mar if entry.masked else expect_tokens
        loaded = expect_model_(inputs.pop(field), field)
        sockets = {i.id: inputs.pop(i.id, None) for i in cls.optional()}
        draft = inputs.pop("draft", None)
        if entry.needs_draft:
            expect_model_(draft, "draft")
        name, asked = chosen(preset, cls.options(), host.typed(cls, "preset"))
        asked |= inputs
        if not checked_switch(enabled, "enabled"):
            name, entry = presets.CUSTOM, SAMPLERS[entry.family]
            asked = {k: v for k, v in asked.items() if k in knobs(entry.settings)}
        settings = settings_for(Choice(entry, name, asked), loaded)
        other = {k: v for k, v in loaded.recommended.items() if k in asked and v != asked[k]}
        advice = f"This model's file recommends {named(entry.settings, other)}." if other else ""
        advice = "\n".join(filter(None, (advice, unknown_words(loaded.model, getattr(condition, "texts", ())))))
        return reported(cls, run(entry, loaded, settings, condition, seed, draft=draft, **sockets), advice)


class MARSampler(_Sampler):
    sampler, node_id, preset = "mar", "FastARMARSampler", None
    description = (
        "Plain MAR, as published: at every AR step the transformer predicts a condition per token and a full diffusion makes each. The "
        "baseline that the accelerators are compared with."
    )
    aliases = ["masked autoregressive", "mar", "autoregressive sampler", "baseline sampler", "disa", "inpaint"]


class FastHybridSampler(_Sampler):
    sampler, node_id = "fasthybrid", "FastARFastHybridSampler"
    description = (
        "Drafts the tokens of several AR steps in one diffusion pass, checks each draft against its real condition when its step comes, "
        "and refines the accepted ones in a few guided steps (CVPR 2026)."
    )
    aliases = ["fast hybrid", "lookahead", "speculative", "accelerated mar", "fasthybrid"]


class LazyMARSampler(_Sampler):
    sampler, node_id = "lazymar", "FastARLazyMARSampler"
    description = (
        "Plain MAR that computes only what changed since the last step: rows of the transformer that hardly move, the null branch of "
        "guidance and most of the diffusion head come from caches (ICCV 2025)."
    )
    aliases = ["lazy mar", "feature cache", "token cache", "condition cache", "accelerated mar"]
    preset = "fast also sets ar_steps, diffusion_steps, diffusion_steps_end and order."


class CSpDSampler(_Sampler):
    sampler, node_id = "cspd", "FastARCSpDSampler"
    description = (
        "Continuous speculative decoding: a small MAR drafts the tokens of several AR steps, the target verifies them together. lossless "
        "keeps the target's distribution exactly; published is the paper's code and approximate."
    )
    aliases = ["continuous speculative decoding", "speculative", "draft model", "cspd", "accelerated mar"]
    models = {
        "draft": "A small MAR that drafts tokens, from its own Load MAR; same tokens, grid and classes as the target.",
        "target": "The MAR whose pictures are wanted; it verifies the drafts.",
    }


class LazyMARCache(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="FastARLazyMARFeatureCache",
            display_name="LazyMAR Cache",
            category="FastAR/sample",
            description="LazyMAR's caches for the cache input of MAR, FastHybrid and CSpD Sampler. Use it to combine LazyMAR with other "
            "samplers.",
            search_aliases=["lazy mar", "feature cache", "combine accelerators"],
            widgets=[preset_widget(widgets(CacheSettings))],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
            outputs=[output(CACHE, "cache", "For the cache input of a MAR sampler.")],
        )

    @classmethod
    def execute(cls, preset: Any = None) -> io.NodeOutput:
        name, values = chosen(preset, PRESETS, host.typed(cls, "preset"))
        make(CacheSettings, values)  # checks them
        return io.NodeOutput(CachePlan(name, values))


class LlamaGenSampler(_Sampler):
    sampler, node_id, preset = "llamagen", "FastARLlamaGenSampler", None
    description = (
        "Plain LlamaGen, as published: one token after another, row by row. The baseline that PAR and ZipAR are compared with. Also for "
        "Janus and for the codes of Tar."
    )
    aliases = ["llamagen", "tar", "autoregressive sampler", "token sampler", "raster", "baseline sampler"]
    models = {"model": _LLAMAGEN_MODEL}


class PARSampler(_Sampler):
    sampler, node_id, preset = "par", "FastARPAR", None
    description = (
        "Cuts the picture into regions and decides one token per region in parallel: distant tokens depend little on each other "
        "(CVPR 2025). Needs a PAR; on a plain LlamaGen it shows the paper's ablations."
    )
    aliases = ["par", "parallelized autoregressive", "parallel decoding", "accelerated llamagen"]
    models = {"model": "The PAR to sample, from Load LlamaGen / PAR; a plain LlamaGen for the ablations of grouping."}


class ZipARSampler(_Sampler):
    sampler, node_id = "zipar", "FastARZipARSampler"
    description = (
        "Starts a row as soon as the row above is a window of tokens ahead, so that several rows grow in one pass: nearby tokens matter "
        "most (ICML 2025). Works with any LlamaGen, with Janus and with Tar, untrained."
    )
    aliases = ["zipar", "parallel decoding", "spatial locality", "accelerated llamagen", "accelerated tar"]
    models = {"model": _LLAMAGEN_MODEL}
    preset = "exact is a window of a whole row: plain decoding."


class MuLoSDSampler(_Sampler):
    sampler, node_id, vae = "mulosd", "FastARMuLoSDSampler", "the target's loader"
    description = (
        "Drafts the picture small, enlarges it, checks all of it in one pass of the large model, and resamples only what is unlikely, with "
        "its surroundings, many places at once (CVPR 2026). Lossy: pictures differ from the large model's own."
    )
    aliases = ["mulo-sd", "mulosd", "multi-scale", "speculative decoding", "accelerated tar", "accelerated llamagen"]
    models = {
        "target": "The model whose picture is wanted: Tar's de-tokenizer of 512 or 1024 pixels from Load Tar De-tokenizer, or a LlamaGen.",
        "draft": "A model of the same kind and decoder that makes the same picture smaller, by half, a third or a quarter of the side: "
        "Tar's de-tokenizer of 256 pixels, usually.",
    }
    preset = (
        "balanced and fast keep 70 and 90 of 100 drafted tokens of full-size models, and on the demo what tau 0.1 keeps, with wider and "
        "narrower windows. exact resamples everything: the target's own picture, without a draft."
    )

    @classmethod
    def optional(cls) -> list[io.Input]:
        return [
            io.UpscaleModel.Input(
                "upscale_model",
                optional=True,
                tooltip="Enlarges the draft, from Load Upscale Model; without one it is enlarged bicubically. Sharper drafts lose fewer "
                "tokens. One of the same factor as the two models fits best; any other is brought to the size.",
            )
        ]


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
