"""Running a sampler in ComfyUI, for every node that samples.

A run takes three steps, in this order:

1. check: the values of the sockets become a :class:`MaskedRun`, a :class:`BlockRun` or a :class:`TokenRun`. What is
   wrong is refused here, before anything is loaded.
2. estimate: the memory that the run needs, from shapes alone.
3. run: the weights are loaded with that much memory free, and the sampler is driven to its end.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
from comfy_api.latest import io
from torch import Tensor, nn

from ..assembly import DEMO_LABELS, PAR, expect_same_codes
from ..errors import UserError
from ..memory import enough_memory
from ..model_loaders.networks.bitdance import BlockModel
from ..model_loaders.networks.llama import TokenModel
from ..model_loaders.networks.mar import MARModel
from ..reports.exchange import add_runs, described
from ..reports.record import Baseline, Qualities, Report
from ..reports.summary import no_gain, one_line
from ..samplers import presets, registry
from ..samplers.batches import expect_little_noise, in_parts, run_beginning, short
from ..samplers.blocks.loop import expect_edit, expect_suited
from ..samplers.blocks.memory import estimate as block_memory
from ..samplers.choice import Choice, choose
from ..samplers.conditioning import (
    AnyCondition,
    CodeCondition,
    Condition,
    FeatureCondition,
    MaskedCondition,
    PromptCondition,
    TextCondition,
    expect_kind,
    expect_null_prompt,
    labels_for,
)
from ..samplers.editing import Edit
from ..samplers.mar.cspd import check_pair as check_drafting
from ..samplers.mar.lazymar import LazyTransformer
from ..samplers.mar.lazymar import check as check_caches
from ..samplers.mar.loop import edited
from ..samplers.mar.memory import DECODE, WEIGHTS
from ..samplers.mar.memory import estimate as masked_memory
from ..samplers.mar.settings import CacheSettings
from ..samplers.noise import PairedNoise
from ..samplers.numbers import numbers, own_values
from ..samplers.registry import SAMPLERS, Entry
from ..samplers.settings import knobs, named, shown
from ..samplers.tokens.conditioning import features_of
from ..samplers.tokens.draws import PairedDraws
from ..samplers.tokens.loop import resolve, tokens_again
from ..samplers.tokens.memory import estimate as token_memory
from ..samplers.tokens.mulosd import check_grids, check_pair
from ..samplers.tokens.upsampling import UpSampling
from . import graph, host
from .host import TA_TOK, Loaded, load_to_device, to_device
from .images import to_bytes
from .preview import drive
from .schema import (
    FREE,
    checked_seed,
    describe,
    expect,
    expect_latents,
    expect_mask,
    expect_model,
    expect_usual_size,
)
from .vae import BITS, KL, VQ, FastARVAE, kind_of, mark

# A sampler's generator, and its steps and result: of token models with ``codes``, of the others with ``latents``.
Steps: TypeAlias = Generator[Any, None, Any]
C = TypeVar("C", bound=AnyCondition)

# Names of loaders and nodes in messages.
MAR_LOADERS = "Load MAR or Load Harmon / UniPic"
TOKEN_LOADERS = "Load LlamaGen / PAR, Load Tar De-tokenizer or Load Janus"
BLOCK_LOADER = "Load BitDance"
CONDITIONS = "Class Label, Prompt, LlamaGen Prompt, Tar Prompt or Image to Codes"
# If memory is insufficient to encode texts, images or codes.
READING = (
    "dtype: memory is insufficient for this model; choose int8, bf16 or fp16 where it is offered, or unload other "
    "models."
)

# Upper estimate of a TA-Tok's activations for the codes of one image; images are read one at a time.
_READER_BYTES = 256 << 20
# Pixels that pass through the decoder at once when a draft is enlarged.
_PIXELS = 1 << 21

# Samplers that run here: all but the second name of LlamaGen.
RUNNABLE = {name: entry for name, entry in SAMPLERS.items() if name != registry.TAR}


# ------------------------------------------------------------------------------------------------ models on sockets


def expect_mar(value: Any, field: str) -> Loaded[MARModel]:
    """Check that a socket holds a MAR, Harmon or UniPic."""
    return expect_model(value, Loaded, MARModel, field, MAR_LOADERS)


def expect_tokens(value: Any, field: str) -> Loaded[TokenModel]:
    """Check that a socket holds a token model with its decoder."""
    loaded = expect_model(value, Loaded, TokenModel, field, TOKEN_LOADERS)

    if loaded.vae is None:
        raise UserError(f"{field}: it came without its decoder; connect the output of {TOKEN_LOADERS}.")
    return loaded


def expect_blocks(value: Any, field: str) -> Loaded[BlockModel]:
    """Check that a socket holds a BitDance."""
    return expect_model(value, Loaded, BlockModel, field, BLOCK_LOADER)


def expect_any(value: Any, field: str) -> Loaded[Any]:
    """Check that a socket holds a MAR, a BitDance, or a token model with its decoder."""
    loaded = expect(value, Loaded, field, f"{MAR_LOADERS}, {TOKEN_LOADERS}, {BLOCK_LOADER}")

    if isinstance(loaded.model, TokenModel):
        return expect_tokens(loaded, field)
    if isinstance(loaded.model, BlockModel):
        return expect_blocks(loaded, field)
    return expect_mar(loaded, field)


def drawn_by(model: Any) -> str:
    """What decodes the result of a model's samplers, see :attr:`.registry.Family.decoder`."""
    if isinstance(model, BlockModel):
        return BITS
    return KL if isinstance(model, MARModel) else VQ


def expect_pair(model: Any, draft: Any) -> tuple[Loaded[Any], Loaded[Any] | None]:
    """The model and the optional draft model of a node that runs any sampler."""
    target = expect_any(model, "model")
    small = None if draft is None else expect_any(draft, "draft")
    return target, small


def expect_runnable(choice: Choice, loaded: Loaded[Any], draft: Any) -> None:
    """Check that a sampler runs here, suits the model and has its draft model."""
    entry = choice.entry
    if entry.name not in RUNNABLE:
        raise UserError(f"sampler: {entry.name} does not run here; choose one of {', '.join(RUNNABLE)}.")

    kind = drawn_by(loaded.model)
    if entry.decoder != kind:
        family = registry.FAMILIES[SAMPLERS[baseline_of(loaded)].family]
        suited = ", ".join(name for name, other in RUNNABLE.items() if other.decoder == kind)
        raise UserError(
            f"sampler: {entry.name} samples {entry.models}, and this is {describe(loaded)}{family.nature}; choose "
            f"{suited}."
        )

    if entry.needs_draft and draft is None:
        raise UserError(f"draft: {entry.name} needs a draft model; connect one of the same family.")


# ------------------------------------------------------------------------------------------------ choices and settings


def baseline_of(loaded: Loaded[Any]) -> str:
    """Name of the plain sampler of a model; of a PAR, the sampler that it was trained for."""
    if isinstance(loaded.model, MARModel):
        return registry.MAR
    if isinstance(loaded.model, BlockModel):
        return registry.BITDANCE

    trained_for_par = loaded.model.net.config.special > 0
    return PAR if trained_for_par else registry.LLAMAGEN


def baseline_choice(choice: Choice, loaded: Loaded[Any]) -> Choice:
    """The plain sampler of a model with the settings that it shares with a choice."""
    plain = SAMPLERS[baseline_of(loaded)]

    known = knobs(plain.settings)
    shared = {name: value for name, value in choice.values.items() if name in known}
    return Choice(plain, values=shared)


def settings_for(choice: Choice, loaded: Loaded[Any]) -> Any:
    """The settings of a choice on a model: its values, the preset's, the file's recommendations, the defaults."""
    model = loaded.model

    # Papers state some values by the width of a MAR's transformer.
    width = model.net.config.dim if isinstance(model, MARModel) else 0

    return choice.settings(loaded.recommended, demo=model.label_set == DEMO_LABELS, width=width)


def expect_suited_settings(choice: Choice, loaded: Loaded[Any]) -> None:
    """Check the settings of a choice against a model, where it runs later."""
    choice.entry.check(loaded.model, settings_for(choice, loaded))


def unlike_preset(preset: str, names: Iterable[str], settings: Any, meant: Any, model: Any) -> str:
    """What to say of numbers that arrived under a preset and are not its own; "" if all are.

    Args:
        preset: the option of the preset widget.
        names: the settings that arrived.
        settings: those of the run.
        meant: those that the preset alone gives for the model.
        model: the model of the run.
    """
    used = numbers(settings, own_values(model, settings))
    of_preset = numbers(meant, own_values(model, meant))
    differing: list[str] = []
    for name in names:
        if name not in FREE and used[name] != of_preset[name]:
            given = named(type(settings), {name: used[name]}, all=True)
            differing.append(f"{given}, {preset} has {shown(of_preset[name])}")

    if not differing:
        return ""
    few = "; ".join(differing[:3]) + ("; ..." if len(differing) > 3 else "")
    return f"custom: these numbers are not those of *{preset}* for this model ({few})."


def cache_unlike_preset(plan: CachePlan, loaded: Loaded[Any], settings: Any) -> str:
    """:func:`unlike_preset` of LazyMAR Cache, for the model of the sampler that it feeds."""
    if not plan.preset_given or plan.preset == presets.CUSTOM:
        return ""

    used = plan.settings(loaded, settings.steps)
    meant = plan.settings(loaded, settings.steps, {})
    said = unlike_preset(plan.preset, plan.values, used, meant, loaded.model)
    return f"LazyMAR Cache: {said}" if said else ""


# ------------------------------------------------------------------------------------------------ conditions on sockets


@dataclass(frozen=True)
class LabelText:
    """Labels, ``repeat`` images of each, whose label set is the one of the model that samples them."""

    text: str
    repeat: int


def as_labels(value: Any, label_set: str) -> Condition:
    """The class labels on a condition socket, for a model of that label set."""
    if isinstance(value, LabelText):
        return labels_for(value.text, label_set, value.repeat, field="condition")

    return expect(value, Condition, "condition", "Class Label")


def texts_of(condition: Any) -> tuple[str, ...]:
    """The prompts of a condition that the sampled model reads itself; none of other conditions."""
    return condition.texts if isinstance(condition, PromptCondition) else ()


def _latent_condition(value: Any, model: MARModel | BlockModel) -> MaskedCondition:
    """The condition on the socket, of the kind that the model reads."""
    if model.condition == PromptCondition.kind:
        prompts = expect(value, PromptCondition, "condition", "Prompt")
        if isinstance(model, BlockModel):
            expect_null_prompt(prompts, model.name)
        return prompts

    return as_labels(value, model.label_set)


def _token_condition(value: Any, model: TokenModel) -> AnyCondition:
    """Check that a socket holds a condition; the sampler checks that it fits the model."""
    if isinstance(value, LabelText):
        return as_labels(value, model.label_set)

    if isinstance(value, PromptCondition):
        expect_null_prompt(value, model.name)

    if isinstance(value, AnyCondition):
        return value
    raise UserError(f"condition: it got {describe(value)}; connect the output of {CONDITIONS}.")


# Nodes that read large files to what they make.
_SLOW: dict[str, type[TextCondition] | type[CodeCondition]] = {
    "FastARLlamaGenPrompt": TextCondition,
    "FastARTarPrompt": CodeCondition,
    "FastARImageToCodes": CodeCondition,
}


class ModelFirst(io.ComfyNode):  # type: ignore[misc]
    """A node whose model is loaded before its condition is made.

    A condition that does not fit the model is refused before the files that make it are downloaded.
    """

    @classmethod
    def check_lazy_status(cls, condition: Any = None, **inputs: Any) -> list[str]:
        loaded = inputs["target"] if "target" in inputs else inputs.get("model")
        made = _SLOW.get(graph.maker(cls, "condition"))

        model = loaded.model if isinstance(loaded, Loaded) else None
        if made is not None and isinstance(model, MARModel | BlockModel):
            expect_kind(made, model.condition, model.name)  # type: ignore[arg-type]

        if made is not None and isinstance(model, TokenModel):
            read = model.net.config.condition
            turned_into_features = made.kind == "codes" and read == "features"  # by a de-tokenizer's TA-Tok
            if not turned_into_features:
                expect_kind(made, read, model.name)  # type: ignore[arg-type]

        return ["condition"]


# ------------------------------------------------------------------------------------------------ 1. check


@dataclass(frozen=True)
class Sockets:
    """Values of a sampler's sockets beside the model, as they arrive; None where nothing is connected."""

    condition: Any
    draft: Any = None
    cache: Any = None
    latent_image: Any = None
    mask: Any = None
    upscale_model: Any = None


@dataclass(frozen=True)
class CachePlan:
    """Value of a cache socket: the preset of LazyMAR Cache and its values, which depend on the sampled model."""

    preset: str
    values: Mapping[str, Any]
    preset_given: bool = False  # whether a prompt named the preset

    def settings(self, loaded: Loaded[MARModel], steps: int, values: Mapping[str, Any] | None = None) -> Any:
        """The settings for a model and a number of AR steps; ``values`` in the place of the plan's."""
        model = loaded.model
        demo = model.label_set == DEMO_LABELS
        asked = self.values if values is None else values
        return presets.combine(CacheSettings, {}, self.preset, asked, demo, model.net.config.dim, steps)


@dataclass(frozen=True)
class Room:
    """What a run needs on the device."""

    memory: float  # bytes, beside the weights
    latents: tuple[int, int, int, int]  # shape of the decoder's latents [B, C, h, w], for previews
    others: list[host.ModelPatcher] = field(default_factory=list)  # networks beside the model's


@dataclass(frozen=True)
class LatentRun:
    """A checked run of a model whose samplers draw latents with paired noise."""

    entry: Entry
    loaded: Loaded[Any]
    settings: Any
    condition: MaskedCondition
    seed: int
    edit: Edit | None
    numbers: Sequence[int]  # of the images, which their noise depends on
    draft: Loaded[MARModel] | None = None
    cache: CacheSettings | None = None

    @property
    def images(self) -> int:
        return len(self.condition)

    def estimate(self) -> Room:
        """What the run needs.

        The stages' memory is added, because allocators reuse little between them.
        """
        others = [] if self.draft is None else self.draft.patchers
        working = sum(count for name, count in self.stages().items() if not name.startswith(WEIGHTS))
        return Room(working, (self.images, *self.shape()), others)

    def stages(self) -> dict[str, int]:
        """Bytes by stage."""
        raise NotImplementedError

    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image's latents."""
        raise NotImplementedError

    def start(self, room: Room) -> tuple[Steps, FastARVAE | None]:
        """Load the weights and begin the sampler; returns its steps, and the decoder of previews if there are any."""
        vae = to_device(self.loaded, room.memory, room.latents, room.others)
        return in_parts(self._sample, self.images, self.loaded.model.net), vae

    def _sample(self, part: range) -> Steps:
        """The sampler on some of the images."""
        more: dict[str, Any] = {"edit": None if self.edit is None else self.edit.of(part, self.images)}
        if self.draft is not None:
            more["draft"] = self.draft.model
        if self.cache is not None:
            more["transformer"] = LazyTransformer(self.cache)
        if self.cache is not None and self.draft is not None:
            more["draft_transformer"] = LazyTransformer(self.cache)

        condition = self.condition.of(part)
        noise = PairedNoise(self.seed, [self.numbers[i] for i in part])
        return self.entry.run(self.loaded.model, condition, self.settings, noise, **more)

    def latents(self, step: Any) -> Tensor:
        """Latents [B, C, h, w] of a step or of the result."""
        return step.latents


@dataclass(frozen=True)
class MaskedRun(LatentRun):
    """A checked run of a MAR, Harmon or UniPic."""

    loaded: Loaded[MARModel]

    def stages(self) -> dict[str, int]:
        cache = self.settings if isinstance(self.settings, CacheSettings) else self.cache
        return masked_memory(self.loaded.model, self.condition, self.settings, cache)

    def shape(self) -> tuple[int, int, int]:
        model = self.loaded.model
        side = model.net.config.grid * model.patch
        return model.net.config.channels // model.patch**2, side, side


@dataclass(frozen=True)
class BlockRun(LatentRun):
    """A checked run of a BitDance."""

    loaded: Loaded[BlockModel]

    def stages(self) -> dict[str, int]:
        return block_memory(self.loaded.model, self.condition, self.settings, self.edit is not None)

    def shape(self) -> tuple[int, int, int]:
        model = self.loaded.model
        height, width = model.grid(self.settings.height, self.settings.width, self.settings.any_size)
        return model.net.channels, height, width


@dataclass(frozen=True)
class TokenRun:
    """A checked run of a token model; with a draft model, of MuLo-SD."""

    entry: Entry
    loaded: Loaded[TokenModel]
    vae: FastARVAE
    settings: Any
    condition: AnyCondition
    seed: int
    edit: Edit | None  # its start are latents
    numbers: Sequence[int]  # of the images, which their draws depend on
    draft: Loaded[TokenModel] | None
    upscale_model: Any  # None: a draft is enlarged bicubically

    @property
    def images(self) -> int:
        return len(self.condition)

    def estimate(self) -> Room:
        """The sampler's memory, and with a draft model that of the encoder too."""
        model = self.loaded.model
        vae = self.vae
        small = None if self.draft is None else self.draft.model
        memory = token_memory(model, self.condition, self.settings, small)
        latents = (self.images, vae.latent_channels, model.grid, model.grid)
        if self.draft is None:
            return Room(memory, latents)

        # The draft is enlarged between the decoder and the encoder.
        side = model.grid * vae.downscale_ratio
        at_once = max(1, min(self.images, _PIXELS // side**2))
        encoding = at_once * vae.memory_used_encode((1, 3, side, side), vae.vae_dtype)
        return Room(memory + encoding, latents, [*self.draft.patchers, vae.patcher])

    def start(self, room: Room) -> tuple[Steps, FastARVAE | None]:
        """Read the condition, load the weights, turn the image to change into codes, and begin the sampler.

        Returns its steps, and the decoder of previews if there are any.
        """
        condition = _read_codes(self.condition, self.loaded)

        def place() -> FastARVAE | None:
            return to_device(self.loaded, room.memory, room.latents, room.others)

        vae = place()
        edit = None if self.edit is None else _edit_codes(self.edit, self.vae)

        drafted: dict[str, Any] = {}
        if self.draft is not None:
            drafted = {"draft": self.draft.model, "up_sampler": self._up_sampling(place)}

        def sample(part: range) -> Steps:
            """The sampler on some of the images; MuLo-SD, which has a draft model, makes no edits."""
            more = drafted if edit is None else {"edit": edit.of(part, self.images)}
            draws = PairedDraws(self.seed, [self.numbers[i] for i in part])
            return self.entry.run(self.loaded.model, condition.of(part), self.settings, draws, **more)

        return in_parts(sample, self.images, self.loaded.model.net), vae

    def _up_sampling(self, place: Callable[[], Any]) -> UpSampling:
        """What enlarges the draft; ``place`` loads the run's networks again after an upscale model."""
        if self.upscale_model is None:
            return UpSampling(self.vae.tokenizer)

        enlarge = host.upscaler(self.upscale_model, place)
        return UpSampling(self.vae.tokenizer, enlarge, _upscale_name(self.upscale_model))

    def latents(self, step: Any) -> Tensor:
        """Code vectors [B, C, h, w] of a step or of the result, a LATENT."""
        return self.vae.vectors(step.codes)


Run: TypeAlias = LatentRun | TokenRun


def check(entry: Entry, loaded: Loaded[Any], settings: Any, seed: int, sockets: Sockets) -> Run:
    """Check the inputs of a run; nothing is loaded or computed.

    Raises:
        UserError: the first input that is wrong.
    """
    if entry.latents:
        return _check_latents(entry, loaded, settings, seed, sockets)
    return _check_tokens(entry, loaded, settings, seed, sockets)


def _check_latents(entry: Entry, loaded: Loaded[Any], settings: Any, seed: int, sockets: Sockets) -> LatentRun:
    model = loaded.model
    entry.check(model, settings)
    whole = _latent_condition(sockets.condition, model)
    condition, edit, numbers = _in_batch(whole, _checked_edit(sockets, entry.decoder), sockets.latent_image)
    expect_little_noise(model, settings, len(condition), "condition")
    if isinstance(model, BlockModel):
        expect_suited(model, host.get_compute_device(), settings)
        if edit is not None:
            expect_edit(model, edit, settings, len(condition))
        return BlockRun(entry, loaded, settings, condition, seed, edit, numbers)

    draft = None
    if entry.needs_draft:
        draft = expect_mar(sockets.draft, "draft")
        check_drafting(draft.model, model)
    cache = _checked_cache(sockets.cache, loaded, settings)
    if cache is not None:
        check_caches(model, settings, cache)
    if edit is not None:
        edited(model, edit, len(condition), edit.start.device)
    return MaskedRun(entry, loaded, settings, condition, seed, edit, numbers, draft, cache)


def _check_tokens(entry: Entry, loaded: Loaded[TokenModel], settings: Any, seed: int, sockets: Sockets) -> TokenRun:
    model = loaded.model
    vae = loaded.vae
    assert vae is not None  # checked by expect_tokens
    if entry.name == PAR and model.net.config.condition == "features":
        raise UserError(
            f"model: {model.name} is a Tar de-tokenizer, which decides its tokens row by row; connect a PAR, "
            "or use LlamaGen Sampler or ZipAR Sampler."
        )

    entry.check(model, settings)
    whole = _token_condition(sockets.condition, model)
    condition, edit, numbers = _in_batch(whole, _checked_edit(sockets, VQ), sockets.latent_image)
    if edit is not None:
        tokens_again(edit, model.grid, len(condition), edit.start.device)

    settings = resolve(settings, model)
    if not entry.needs_draft:
        return TokenRun(entry, loaded, vae, settings, condition, seed, edit, numbers, draft=None, upscale_model=None)

    draft = expect_tokens(sockets.draft, "draft")
    assert draft.vae is not None
    expect_same_codes(vae.tokenizer, draft.vae.tokenizer, model.name)
    check_pair(model, draft.model, vae.tokenizer.net.config.codes, entry.title)
    check_grids(model, draft.model)

    upscale_model = sockets.upscale_model
    if upscale_model is not None and not _is_upscale_model(upscale_model):
        raise UserError(
            f"upscale_model: it got {describe(upscale_model)}; connect the output of Load Upscale Model "
            "with a model for colour images."
        )

    return TokenRun(entry, loaded, vae, settings, condition, seed, edit, numbers, draft, upscale_model)


def _checked_cache(value: Any, loaded: Loaded[MARModel], settings: Any) -> CacheSettings | None:
    """The settings of LazyMAR's caches for a model; None if the cache socket is not connected."""
    if value is None:
        return None

    if isinstance(value, CachePlan):
        value = value.settings(loaded, settings.steps)

    return expect(value, CacheSettings, "cache", "LazyMAR Cache")


def _checked_edit(sockets: Sockets, kind: str) -> Edit | None:
    """The edit of the sockets ``latent_image`` and ``mask``, None if both are unconnected.

    ``kind`` is that of the latents, see ``vae``.
    """
    latent = sockets.latent_image
    mask = sockets.mask
    if latent is None and mask is None:
        return None

    if latent is None:
        raise UserError(
            "latent_image: there is a mask but no image to inpaint; connect the output of VAE Encode, or disconnect "
            "mask."
        )
    if not isinstance(latent, dict) or "samples" not in latent:
        raise UserError(f"latent_image: it got {describe(latent)}; connect the output of VAE Encode.")
    if kind_of(latent["samples"]) not in ("", kind):
        raise UserError(
            "latent_image: it is of another family, which has other latents; connect VAE Encode with the vae of the "
            "model's loader."
        )

    if mask is None:
        mask = latent.get("noise_mask")
    if mask is None:
        raise UserError("mask: inpainting needs a mask; connect one, or disconnect latent_image.")

    with enough_memory("mask: memory is insufficient for this image and its mask; connect smaller ones."):
        start = expect_latents(latent["samples"], "latent_image")
        expect_usual_size(start, "latent_image")
        return Edit(start, expect_mask(mask, "mask"))


# Where core's nodes note which images of a batch a part of it is: Rebatch Latents, Latent From Batch.
BATCH_INDEX = "batch_index"


def _in_batch(condition: C, edit: Edit | None, latent: Any) -> tuple[C, Edit | None, Sequence[int]]:
    """The condition and the edit of the images to draw, and the numbers that their noise depends on.

    A latent that is part of a batch says which of its images it holds: each is drawn as in the whole batch. Its number
    is its place there. Of a condition or a mask with more entries than the latent, it gets the entry of that place; of
    as many entries, they belong to the latent's images in their order.

    Raises:
        UserError: places that are none, or a place that the condition does not have.
    """
    if edit is None or BATCH_INDEX not in latent:
        return condition, edit, range(len(condition))

    count = len(edit.start)
    places = _places(latent[BATCH_INDEX], count)
    if len(condition) > count:
        if max(places) >= len(condition):
            raise UserError(
                f"condition: it asks for {len(condition)} images, and latent_image holds image {max(places) + 1} of a "
                f"batch; ask for {count} images, or for as many as the whole batch has."
            )
        condition = cast(C, condition.of(places))

    if len(edit.mask) > count and max(places) < len(edit.mask):
        edit = replace(edit, mask=edit.mask[places])
    return condition, edit, places


def _places(value: Any, count: int) -> list[int]:
    """The places of ``count`` latents in their batch, checked: another pack may have made them."""
    try:
        places = [operator.index(place) for place in value]
    except TypeError:
        places = []

    if len(places) != count or min(places) < 0:
        raise UserError(
            f"latent_image: its batch_index is not a place from 0 for each of its {count} latents; make it again, for "
            "example with Latent From Batch."
        )
    return places


def _is_upscale_model(value: Any) -> bool:
    """Whether a value is an UPSCALE_MODEL for colour images."""
    if not callable(value) or not isinstance(getattr(value, "model", None), nn.Module):
        return False

    scale = getattr(value, "scale", None)
    enlarges = isinstance(scale, (int, float)) and scale > 0
    colour = getattr(value, "input_channels", 3) == 3 and getattr(value, "output_channels", 3) == 3
    return enlarges and colour


def _upscale_name(upscale_model: Any) -> str:
    """Architecture and factor of an UPSCALE_MODEL, for reports."""
    architecture = getattr(upscale_model, "architecture", None)
    kind = getattr(architecture, "name", None) or type(upscale_model.model).__name__

    return f"{kind} x{upscale_model.scale:g}"


# ------------------------------------------------------------------------------------------------ 3. run


def start(
    entry: Entry, loaded: Loaded[Any], settings: Any, seed: int, sockets: Sockets
) -> tuple[Steps, Run, FastARVAE | None]:
    """Check, estimate and begin a run; returns its steps, the run, and the decoder of previews if there are any."""
    checked = check(entry, loaded, settings, seed, sockets)
    room = checked.estimate()
    steps, vae = checked.start(room)

    return steps, checked, vae


def run(entry: Entry, loaded: Loaded[Any], settings: Any, seed: Any, sockets: Sockets) -> io.NodeOutput:
    """Run a sampler with progress, preview and cancellation, to the latent and the report.

    ``loaded`` was checked to be of the sampler's family.
    """
    seed = checked_seed(seed)
    steps, checked, vae = start(entry, loaded, settings, seed, sockets)
    done = drive(steps, vae, checked.latents)

    with enough_memory(READING):
        samples = host.to_output(checked.latents(done))
    mark(samples, entry.decoder)

    report: Report = done.report
    report.prompt = host.prompt_id()
    if entry.latents and loaded.vae is not None:
        report.memory[DECODE] = int(loaded.vae.memory_used_decode(samples.shape, loaded.vae.vae_dtype))

    latent: dict[str, Any] = {"samples": samples}
    if checked.edit is not None and BATCH_INDEX in sockets.latent_image:
        latent[BATCH_INDEX] = list(checked.numbers)
    return io.NodeOutput(latent, report)


def run_choice(choice: Choice, loaded: Loaded[Any], condition: Any, seed: Any, draft: Any = None) -> io.NodeOutput:
    """Run a sampler on the values of sockets; ``loaded`` was checked by :func:`expect_any`."""
    expect_runnable(choice, loaded, draft)

    settings = settings_for(choice, loaded)
    return run(choice.entry, loaded, settings, seed, Sockets(condition, draft=draft))


def draw_images(
    choice: Choice, loaded: Loaded[Any], condition: Any, seed: int, draft: Any = None
) -> tuple[np.ndarray, Report]:
    """Images uint8 [N, H, W, 3] and the report of :func:`run_choice`."""
    latent, report = run_choice(choice, loaded, condition, seed, draft).result

    assert loaded.vae is not None
    return to_bytes(loaded.vae.decode(latent["samples"])), report


def warm_up(loaded: Loaded[Any], condition: Any) -> None:
    """Begin the plain sampler, untimed, as :func:`samplers.batches.warm_up`."""
    plain = choose(baseline_of(loaded), {})
    settings = short(plain.entry, settings_for(plain, loaded))

    steps, _, _ = start(plain.entry, loaded, settings, 0, Sockets(condition))
    run_beginning(steps)


def _edit_codes(edit: Edit, vae: FastARVAE) -> Edit:
    """The edit with codes in the place of latents."""
    net = vae.tokenizer.net
    codebook = net.quantize.embedding.weight
    _, channels = codebook.shape

    latents = edit.start
    if latents.shape[1] != channels:
        raise UserError(
            f"latent_image: it has the shape {list(latents.shape)}, and the model has latents of {channels} channels; "
            "connect VAE Encode with the vae of the same loader."
        )

    codes = net.codes(latents.to(codebook.device))
    return Edit(codes.cpu(), edit.mask.cpu())


def _read_codes(condition: AnyCondition, loaded: Loaded[TokenModel]) -> AnyCondition:
    """Turn semantic codes into features with the model's TA-Tok, which is on the device only for that."""
    if not isinstance(condition, CodeCondition) or TA_TOK not in loaded.parts:
        return condition

    reader = loaded.parts[TA_TOK]
    load_to_device(reader, _READER_BYTES)
    with enough_memory(READING):
        made = features_of(condition, reader.model)

    device = host.get_compute_device()
    return FeatureCondition(tuple(rows.to(device) for rows in made.features), made.names)


# ------------------------------------------------------------------------------------------------ reports


# The node whose prompt the sampled model reads itself.
PROMPT_NODE = "FastARPrompt"


def reported(
    node: Any,
    output: io.NodeOutput,
    warnings: Sequence[str] = (),
    unknown: str = "",
    own: Mapping[str, Any] | None = None,
) -> io.NodeOutput:
    """Write a sampler's report, the second output of ``output``, to saved images, and add what the node says.

    The node says its warnings first, then the figures, then the settings used.

    Args:
        warnings: sentences about the settings.
        unknown: the sentence about words of the prompt that the model does not know; shown on the prompt's node, or on
            this one if the condition is of another node.
        own: what the model takes where a setting is None; an advanced setting at that value is not shown.
    """
    latent, report = output.result

    # 1. The words that the model does not know belong to the prompt's node.
    prompts: dict[str, str] = {}
    source = graph.source_of(graph.typed(node, "condition"))
    if source is not None and graph.maker(node, "condition") == PROMPT_NODE:
        number, _ = source
        prompts = {number: unknown}
        unknown = ""

    # 2. The lines of this node.
    kind = registry.find(report.sampler).settings
    used = named(kind, _remarkable(kind, report.settings, own or {}))
    told = host.text_output([one_line(report)], [unknown, *warnings, no_gain(report)], f"{used}.", prompts)

    write_reports(node, [report])
    return io.NodeOutput(latent, report, ui=told)


def _remarkable(kind: type, settings: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without the advanced ones that are the model's own, ``own``."""
    found = dict(settings)
    for name, (default, about) in knobs(kind).items():
        if about.advanced and default is None and found.get(name) == own.get(name):
            found.pop(name, None)
    return found


def write_reports(
    node: Any,
    reports: Sequence[Report],
    labels: Sequence[str] = (),
    baseline: Baseline | None = None,
    quality: Qualities = (),
) -> None:
    """Add reports to the metadata that core's Save Image writes to the PNG files of this run.

    ComfyUI gives every node of a run the same dictionary. A run whose images are queued without a workflow has none.
    """
    metadata = host.hidden(node, "extra_pnginfo")
    if not isinstance(metadata, dict):
        return

    number = str(host.hidden(node, "unique_id") or "")
    add_runs(metadata, described(reports, number, labels, baseline, quality))
