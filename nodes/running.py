"""Running a sampler in ComfyUI, for every node that samples.

A run takes three steps, in this order:

1. check: the values of the sockets become a :class:`Run`. What is
   wrong is refused here, before anything is loaded.
2. estimate: the memory that the run needs, from shapes alone.
3. run: the weights are loaded with that much memory free, and the sampler is driven to its end.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias, TypeVar, cast
from weakref import proxy

import numpy as np
from comfy_api.latest import io
from torch import Tensor

from ..errors import OfFastAR, UserError
from ..memory import enough_memory
from ..model_loaders.janus.loader import load_janus_vision
from ..model_loaders.kinds import choose_dtype
from ..model_loaders.upscalers import enlarges_rgb, upscaler_name
from ..networks.autoencoder import VQModel
from ..networks.janus_vision import ImageReader
from ..networks.tar import TarModel
from ..networks.torch_state import in_own_state
from ..reports.record import Report
from ..reports.summary import one_line
from ..runs import registry
from ..runs.baseline import no_gain
from ..runs.batches import run_beginning
from ..runs.choice import Choice, ModelFacts, choose
from ..runs.drawing import Drawing
from ..runs.images import expect_usual_size, to_bytes
from ..runs.labels import labels_for
from ..runs.loading import AUTO, PAR, dtype_name, expect_same_codes, read_images
from ..runs.memory import DECODE, WEIGHTS
from ..runs.registry import SAMPLERS, Entry, family_of
from ..runs.shown import CHOSEN, PRESETS, UNKNOWN, WITHOUT_MODEL, Sent, Shown
from ..samplers.conditioning import (
    AnyCondition,
    CodeCondition,
    Condition,
    FeatureCondition,
    ImagePromptCondition,
    PromptCondition,
    TextCondition,
    expect_editor,
    expect_kind,
    expect_null_prompt,
)
from ..samplers.editing import Edit
from ..samplers.mar.cspd import check_pair as check_drafting
from ..samplers.mar.lazy import check as check_caches
from ..samplers.mar.settings import CacheSettings
from ..samplers.settings import Settings, in_words, is_removed, knobs, make, removed_from
from ..samplers.tokens.mulosd import check_grids, check_pair
from ..samplers.tokens.mulosd.upsampling import UpSampling
from ..samplers.tokens.prepare import features_of
from . import graph, host
from .host.loaded import TA_TOK, Loaded, ModelCache, load_to_device, to_device
from .metadata import write_reports
from .preview import Bar, drive
from .schema import (
    checked_preset,
    checked_seed,
    describe,
    expect_latents,
    expect_mask,
)
from .sockets import LabelText, expect_condition, expect_kind_on, expect_own, kind_on
from .vae import BITS, KL, VQ, FastARVAE, kind_of, mark

# A sampler's generator.
Steps: TypeAlias = Generator[Any, None, Any]
C = TypeVar("C", bound=AnyCondition)

# Names of nodes in messages.
CONDITIONS = "Class Label, Prompt, Image and Prompt, LlamaGen Prompt, Tar Prompt or Image to Codes"
# If memory is insufficient to encode texts, images or codes.
READING = (
    "dtype: memory is insufficient for this model; choose int8, bf16 or fp16 where it is offered, or unload other "
    "models."
)

# Upper estimate of the activations of a TA-Tok for the codes of one image, and of a Janus' tower for one image; images
# are read one at a time.
_READER_BYTES = 256 << 20
# Pixels that pass through the decoder at once when a draft is enlarged.
_PIXELS = 1 << 21


def runnable() -> dict[str, Entry]:
    """The samplers that run here by name: all but the second name of LlamaGen."""
    return {name: entry for name, entry in SAMPLERS.items() if name != registry.TAR}


# ------------------------------------------------------------------------------------------------ models on sockets


# Names of the loaders of models by what decodes their results, see :attr:`.Family.decoder`.
LOADERS = {
    KL: "Load MAR or Load Harmon / UniPic",
    VQ: "Load LlamaGen / PAR, Load Tar De-tokenizer or Load Janus",
    BITS: "Load BitDance",
}


def expect_loaded(value: Any, field: str, decoder: str = "") -> Loaded[Any]:
    """Check that a socket holds a model that draws, with its decoder if it draws codes.

    ``decoder``: what must decode its results; "" for any.
    """
    loaders = LOADERS.get(decoder, ", ".join(LOADERS.values()))
    loaded: Loaded[Any] = expect_kind_on(value, (Loaded.kind,), field, loaders)
    family = registry.FAMILIES.get(loaded.model.family)
    if family is None or decoder and family.decoder != decoder:
        raise UserError(f"{field}: it got {describe(loaded)}; connect the output of {loaders}.")

    if family.codes and loaded.vae is None:
        raise UserError(f"{field}: it came without its decoder; connect the output of {loaders}.")
    return loaded


def expect_language_model(value: Any) -> Loaded[TarModel]:
    """Check that a socket holds Tar's language model."""
    loaded: Loaded[TarModel] = expect_kind_on(value, (Loaded.kind,), "tar", "Load Tar")
    if loaded.model.family != TarModel.family:
        raise UserError(f"tar: it got {describe(loaded)}; connect the output of Load Tar.")
    return loaded


def expect_pair(model: Any, draft: Any) -> tuple[Loaded[Any], Loaded[Any] | None]:
    """The model and the optional draft model of a node that runs any sampler."""
    target = expect_loaded(model, "model")
    small = None if draft is None else expect_loaded(draft, "draft")
    return target, small


def expect_runnable(choice: Choice, loaded: Loaded[Any], draft: Any) -> None:
    """Check that a sampler runs here, suits the model and has its draft model."""
    entry = choice.entry
    if entry.name not in runnable():
        raise UserError(f"sampler: {entry.name} does not run here; choose one of {', '.join(runnable())}.")

    family = family_of(loaded.model)
    if entry.family.kind != family.kind:
        suited = ", ".join(name for name, other in runnable().items() if other.family.kind == family.kind)
        raise UserError(
            f"sampler: {entry.name} samples {entry.models}, and this is {describe(loaded)}{family.nature}; choose "
            f"{suited}."
        )

    if entry.needs_draft and draft is None:
        raise UserError(f"draft: {entry.name} needs a draft model; connect one of the same family.")


# ------------------------------------------------------------------------------------------------ choices and settings


def baseline_of(loaded: Loaded[Any]) -> str:
    """Name of the plain sampler of a model; of a PAR, the sampler that it was trained for."""
    if getattr(loaded.model, "regions", 1) > 1:
        return PAR
    kind = family_of(loaded.model).kind
    return next(name for name, entry in runnable().items() if entry.baseline and entry.family.kind == kind)


def baseline_choice(choice: Choice, loaded: Loaded[Any]) -> Choice:
    """The plain sampler of a model with the settings that it shares with a choice."""
    plain = SAMPLERS[baseline_of(loaded)]

    known = knobs(plain.settings)
    shared = {name: value for name, value in choice.values.items() if name in known}
    return Choice(plain, values=shared)


def facts_of(loaded: Loaded[Any]) -> ModelFacts:
    """What the settings of a run depend on."""
    return ModelFacts.of(loaded.model, loaded.recommended)


def numbers_sent(
    node: Any, preset: Any, options: Sequence[str], values: Mapping[str, Any], hides_model: bool | None = None
) -> Sent:
    """The numbers of a node's settings as they arrived with a preset, and how they came into its graph.

    Args:
        node: the class that executes.
        preset: as it arrived; None if it was left out.
        options: of the preset widget.
        values: the numbers that arrived.
        hides_model: whether the editor could not see the model that arrives; None: as for a sampler.

    Raises:
        UserError: a preset that the node does not have.
    """
    if preset is None:
        return Sent(options[0], values, named=False)

    option = checked_preset(preset, options)
    noted = graph.noted_preset(node) == option
    hides_model = graph.hides_model(node) if hides_model is None else hides_model

    origin = UNKNOWN
    if graph.linked(node, values):
        origin = CHOSEN
    elif noted:
        origin = WITHOUT_MODEL if hides_model else CHOSEN
    return Sent(option, values, origin=origin)


def take_removed(node: Any, kind: type[Settings], inputs: dict[str, Any]) -> dict[str, Any]:
    """What a graph or a script still gives for settings that were removed from ``kind``, the node's settings.

    ComfyUI passes no input that the schema lacks, but a script does: it is taken out of ``inputs``.
    """
    given = {name: inputs.pop(name, graph.typed(node, name)) for name in removed_from(kind)}
    return {name: value for name, value in given.items() if value is not None}


def expect_removed_to_hold(kind: type[Settings], removed: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Check the values that a graph still holds for settings that were removed from ``kind``.

    Args:
        own: what the model decides, by name.

    Raises:
        UserError: a value is not the one that holds now.
    """
    for name, value in removed.items():
        if name not in own or value != own[name]:
            is_removed(kind, name, value)


def expect_suited_settings(choice: Choice, loaded: Loaded[Any]) -> None:
    """Check the settings of a choice against a model, where it runs later."""
    choice.entry.check(loaded.model, choice.settings(facts_of(loaded)))


# ------------------------------------------------------------------------------------------------ conditions on sockets


def as_labels(labels: LabelText, label_set: str) -> Condition:
    """Class labels for a model of that label set."""
    return labels_for(labels.text, label_set, labels.repeat, field="condition")


def texts_of(condition: Any) -> tuple[str, ...]:
    """The prompts of a condition that the sampled model reads itself; none of other conditions."""
    return tuple(condition.texts) if kind_on(condition) == PromptCondition.kind else ()


def as_condition(value: Any, model: Any) -> AnyCondition:
    """The condition on a socket for a model; raises a UserError if it is of a kind that the model does not read."""
    made = expect_condition(value, CONDITIONS)
    if isinstance(made, LabelText):
        expect_kind(Condition, model.condition, model.name)  # type: ignore[arg-type]
        return as_labels(made, model.label_set)

    if isinstance(made, ImagePromptCondition):
        expect_editor(made, model)
        return made
    if not turned_into_features(made.kind, model):
        expect_kind(made, model.condition, model.name)
    if isinstance(made, PromptCondition) and not hasattr(model, "instruction"):  # with its own null prompt
        expect_null_prompt(made, model.name)
    return made


def turned_into_features(kind: str, model: Any) -> bool:
    """Whether a de-tokenizer's TA-Tok turns conditions of a kind into those that the model reads."""
    return kind == CodeCondition.kind and model.condition == FeatureCondition.kind


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

        model = getattr(loaded, "model", None) if kind_on(loaded) == Loaded.kind else None
        if made is not None and model is not None and not turned_into_features(made.kind, model):
            expect_kind(made, model.condition, model.name)  # type: ignore[arg-type]

        return ["condition"]


# ------------------------------------------------------------------------------------------------ 1. check


@dataclass(frozen=True)
class Sockets:
    """Values of a sampler's sockets beside the model, as they arrive, None where nothing is connected; and the number
    of its first image.
    """

    condition: Any
    draft: Any = None
    cache: Any = None
    latent_image: Any = None
    mask: Any = None
    upscale_model: Any = None
    first_image: int = 0


@dataclass(frozen=True)
class CachePlan(OfFastAR):
    """Value of a cache socket: the preset of LazyMAR Cache and its values, which depend on the sampled model."""

    kind: ClassVar[str] = "cache"
    fastar_version: ClassVar[int] = 1  # of its description in docs/sockets.md
    preset: str
    values: Mapping[str, Any]
    preset_given: bool = False  # whether a prompt named the preset
    origin: str = UNKNOWN  # of the values, as in Sent
    removed: Mapping[str, Any] = field(default_factory=dict)  # see :func:`take_removed`

    def __str__(self) -> str:
        """For people: what core's Preview as Text shows."""
        return f"LazyMAR's caches, preset {self.preset}: {in_words(CacheSettings, self.values) or 'its own settings'}."

    def settings(self, loaded: Loaded[Any], steps: int) -> tuple[Any, str]:
        """The settings for a model and a number of AR steps, and what its sampler says of them."""
        sent = Sent(self.preset, self.values, self.preset_given, self.origin)
        made, said = Shown(CacheSettings, PRESETS, facts_of(loaded), steps).settings_sent(sent)
        return made, f"LazyMAR Cache: {said}" if said else ""


@dataclass(frozen=True)
class Room:
    """What a run needs on the device."""

    memory: float  # bytes, beside the weights
    latents: tuple[int, int, int, int]  # shape of the decoder's latents [B, C, h, w], for previews
    others: list[host.memory.ModelPatcher] = field(default_factory=list)  # networks beside the model's


@dataclass(frozen=True)
class Run:
    """A checked run of a sampler."""

    drawing: Drawing  # its edit starts from latents
    loaded: Loaded[Any]
    draft: Loaded[Any] | None = None
    upscale_model: Any = None  # what enlarges a draft; None: bicubically

    @property
    def enlarges(self) -> bool:
        """Whether a draft of a smaller image is enlarged."""
        return self.drawing.entry.needs_up_sampler

    def estimate(self) -> Room:
        """What the run needs.

        The stages' memory is added, because allocators reuse little between them.
        """
        drawing = self.drawing
        memory: float = sum(count for name, count in drawing.memory().items() if not name.startswith(WEIGHTS))

        vae = self.loaded.vae
        height, width = drawing.family.latents(drawing.model, drawing.settings)
        others = [] if self.draft is None else list(self.draft.patchers)
        if self.enlarges:
            # The draft is enlarged between the decoder and the encoder.
            side = height * vae.downscale_ratio
            at_once = max(1, min(drawing.images, _PIXELS // side**2))
            memory += at_once * vae.memory_used_encode((1, 3, side, side), vae.vae_dtype)
            others.append(vae.patcher)

        channels = 0 if vae is None else vae.latent_channels
        return Room(memory, (drawing.images, channels, height, width), others)

    def start(self, room: Room) -> tuple[Steps, FastARVAE | None]:
        """Read the condition, load the weights, and begin the sampler.

        Returns its steps, and the decoder of previews if there are any.
        """
        drawing = self.drawing
        condition = _read_pictures(_read_codes(drawing.condition, self.loaded), self.loaded)

        def place() -> FastARVAE | None:
            return to_device(self.loaded, room.memory, room.latents, room.others)

        vae = place()
        edit = drawing.edit
        if edit is not None and drawing.family.codes:
            edit = _edit_codes(edit, self.loaded.vae)

        up_sampler = self._up_sampling(place) if self.enlarges else None
        return replace(drawing, condition=condition, edit=edit, up_sampler=up_sampler).steps(), vae

    def _up_sampling(self, place: Callable[[], Any]) -> UpSampling:
        """What enlarges the draft; ``place`` loads the run's networks again after an upscale model."""
        tokenizer = self.loaded.vae.tokenizer
        if self.upscale_model is None:
            return UpSampling(tokenizer)

        enlarge = host.images.upscaler(self.upscale_model, place)
        return UpSampling(tokenizer, enlarge, upscaler_name(self.upscale_model))

    def latents(self, step: Any) -> Tensor:
        """Latents [B, C, h, w] of a step or of the result, a LATENT; of codes their vectors."""
        if self.drawing.family.codes:
            return self.loaded.vae.vectors(step.latents)
        return step.latents


def check(entry: Entry, loaded: Loaded[Any], settings: Any, seed: int, sockets: Sockets) -> Run:
    """Check the inputs of a run; nothing is loaded or computed."""
    model = loaded.model
    family = family_of(model)

    # 1. Model and settings.
    entry.check(model, settings)

    # 2. The condition, and the part of an image to draw again.
    whole = as_condition(sockets.condition, model)
    if _is_size(sockets):
        _expect_size(sockets.latent_image, loaded, settings)
        given = None
    else:
        given = _checked_edit(sockets, family.decoder)
    condition, edit, numbers = _in_batch(whole, given, sockets.latent_image)
    numbers = _from_first(numbers, sockets)
    drawing = Drawing(entry, model, settings, condition, seed, numbers, edit)
    drawing.check(host.devices.get_compute_device(), "condition")

    # 3. What else the sampler takes.
    draft = None
    if entry.needs_draft:
        draft = expect_loaded(sockets.draft, "draft", family.decoder)
        _DRAFTS[family.decoder](loaded, draft, entry.title)
    if sockets.cache is not None and not entry.caches:
        raise UserError(f"cache: {entry.title} does not take LazyMAR's caches; disconnect LazyMAR Cache.")
    cache = _checked_cache(sockets.cache, loaded, settings)

    upscale_model = sockets.upscale_model
    if upscale_model is not None and not enlarges_rgb(upscale_model):
        raise UserError(
            f"upscale_model: it got {describe(upscale_model)}; connect the output of Load Upscale Model "
            "with a model for colour images."
        )

    drawing = replace(
        drawing,
        settings=family.complete(model, settings),
        draft=None if draft is None else draft.model,
        cache=cache,
    )
    return Run(drawing, loaded, draft, upscale_model)


def _check_token_draft(loaded: Loaded[Any], draft: Loaded[Any], title: str) -> None:
    """Check a draft model of a smaller image."""
    model = loaded.model
    tokenizer = loaded.vae.tokenizer
    expect_same_codes(tokenizer, draft.vae.tokenizer, model.name)
    check_pair(model, draft.model, tokenizer.net.config.codes, title)
    check_grids(model, draft.model)


# Checks of a draft model, by what decodes the results.
_DRAFTS: dict[str, Callable[[Loaded[Any], Loaded[Any], str], None]] = {
    KL: lambda loaded, draft, title: check_drafting(draft.model, loaded.model),
    VQ: _check_token_draft,
}


def expect_cache(value: Any) -> CachePlan:
    """Check the value of a cache socket, with its settings.

    Raises:
        UserError: another value, or a setting that does not exist or is outside its range.
    """
    plan = expect_own(value, CachePlan, "cache", "LazyMAR Cache")
    with _blamed_on_cache():
        make(CacheSettings, plan.values)
    return plan


def _checked_cache(value: Any, loaded: Loaded[Any], settings: Any) -> CacheSettings | None:
    """The settings of LazyMAR's caches for a model; None if the cache socket is not connected."""
    if value is None:
        return None

    plan = expect_cache(value)
    with _blamed_on_cache(knobs(settings)):
        caches, _ = plan.settings(loaded, settings.steps)
        expect_removed_to_hold(CacheSettings, plan.removed, registry.own_values_of(loaded.model, settings))
        check_caches(loaded.model, settings, caches)
    return caches


@contextmanager
def _blamed_on_cache(own: Collection[str] = ()) -> Iterator[None]:
    """Name the socket in an error about a setting of the caches, which is on another node. ``own``: settings of the
    sampler, which is on this one.
    """
    try:
        yield
    except UserError as problem:
        field, _, _ = str(problem).partition(":")
        if field in own:
            raise
        raise UserError(
            f"cache: its settings do not fit ({str(problem).rstrip('.')}); change them on the node that made it."
        ) from None


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


# Where core's empty latents note their pixels per position; those of older nodes have 8.
PIXELS_PER_LATENT = "downscale_ratio_spacial"
_USUAL_PIXELS = 8


def _is_size(sockets: Sockets) -> bool:
    """Whether ``latent_image`` is no image but a size, as Empty Latent Image makes it: zeros, without a mask here or on
    the latent. Core's samplers take zeros for an empty latent too.
    """
    latent = sockets.latent_image
    if sockets.mask is not None or not isinstance(latent, dict) or "samples" not in latent:
        return False
    if latent.get("noise_mask") is not None:
        return False

    with enough_memory("latent_image: memory is insufficient to read it; connect a smaller one."):
        return not bool(expect_latents(latent["samples"], "latent_image").any())


def _expect_size(latent: Mapping[str, Any], loaded: Loaded[Any], settings: Any) -> None:
    """Check that an empty latent has the size of the images that a run draws: decoded, as VAE Encode reads them, or, if
    it does not say its pixels, in positions of the model's own latents.
    """
    vae = loaded.vae
    rows, columns = latent["samples"].shape[-2:]
    height, width = family_of(loaded.model).latents(loaded.model, settings)
    if PIXELS_PER_LATENT not in latent and (rows, columns) == (height, width):
        return

    pixels = latent.get(PIXELS_PER_LATENT, _USUAL_PIXELS)
    asked = (rows * pixels, columns * pixels)
    if any(asked == (height * ratio, width * ratio) for ratio in (vae.upscale_ratio, vae.downscale_ratio)):
        return

    drawn = f"{width * vae.upscale_ratio} x {height * vae.upscale_ratio}"
    remedy = "set this size there"
    if asked in vae.sizes:  # a model of several sizes, one of which the sampler sets
        remedy = f"set width to {asked[1]} and height to {asked[0]}"
    raise UserError(
        f"latent_image: it is empty and asks for an image of {asked[1]} x {asked[0]} pixels, and {loaded.model.name} "
        f"draws {drawn} here; {remedy}, or disconnect latent_image."
    )


# Where core's nodes note which images of a batch a part of it is: Rebatch Latents, Latent From Batch.
BATCH_INDEX = "batch_index"


def _in_batch(condition: C, edit: Edit | None, latent: Any) -> tuple[C, Edit | None, Sequence[int]]:
    """The condition and the edit of the images to draw, and the numbers that their noise depends on.

    A single entry of a condition is for all images of the latent, as in core.

    A latent that is part of a batch says which of its images it holds: each is drawn as in the whole batch. Its number
    is its place there. Of a condition or a mask with more entries than the latent, it gets the entry of that place; of
    as many entries, they belong to the latent's images in their order.
    """
    if latent is None:
        return condition, edit, range(len(condition))

    count = len(latent["samples"])
    if len(condition) == 1:
        condition = cast(C, condition.of([0] * count))
    images = len(condition)
    if edit is None and images != count and (images < count or count > 1 and BATCH_INDEX not in latent):
        raise UserError(
            f"latent_image: its batch_size asks for {count} images, and the condition for {images}; set it to 1, or to "
            "as many."
        )
    if BATCH_INDEX not in latent:
        return condition, edit, range(images)

    places = _places(latent[BATCH_INDEX], count)
    if images > count:
        if max(places) >= images:
            raise UserError(
                f"condition: it asks for {images} images, and latent_image holds image {max(places) + 1} of a "
                f"batch; ask for {count} images, or for as many as the whole batch has."
            )
        condition = cast(C, condition.of(places))

    if edit is not None and len(edit.mask) > count and max(places) < len(edit.mask):
        edit = replace(edit, mask=edit.mask[places])
    return condition, edit, places


def _from_first(numbers: Sequence[int], sockets: Sockets) -> Sequence[int]:
    """The numbers of the images, the first of which is that of the node's widget."""
    first = sockets.first_image
    if first and _knows_places(sockets):
        raise UserError("first_image: latent_image already says which images of a batch it holds; set it to 0.")

    return [first + number for number in numbers]


def _knows_places(sockets: Sockets) -> bool:
    """Whether the latent on a socket says which images of a batch it holds."""
    return isinstance(sockets.latent_image, Mapping) and BATCH_INDEX in sockets.latent_image


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


# ------------------------------------------------------------------------------------------------ 3. run


def start(
    entry: Entry, loaded: Loaded[Any], settings: Any, seed: int, sockets: Sockets
) -> tuple[Steps, Run, FastARVAE | None]:
    """Check, estimate and begin a run; returns its steps, the run, and the decoder of previews if there are any."""
    checked = check(entry, loaded, settings, seed, sockets)
    room = checked.estimate()
    steps, vae = checked.start(room)

    return steps, checked, vae


@in_own_state
def run(
    entry: Entry, loaded: Loaded[Any], settings: Any, seed: Any, sockets: Sockets, bar: Bar | None = None
) -> io.NodeOutput:
    """Run a sampler with progress, preview and cancellation, to the latent and the report.

    ``loaded`` was checked to be of the sampler's family; ``bar``: the progress bar of a node with several runs.
    """
    seed = checked_seed(seed)
    steps, checked, vae = start(entry, loaded, settings, seed, sockets)
    done = drive(steps, vae, checked.latents, bar)

    with enough_memory(READING):
        samples = host.devices.to_output(checked.latents(done))
    mark(samples, entry.family.decoder)

    report: Report = done.report
    report.prompt = host.queue.prompt_id()
    if not entry.family.codes and loaded.vae is not None:
        report.memory[DECODE] = int(loaded.vae.memory_used_decode(samples.shape, loaded.vae.vae_dtype))

    latent: dict[str, Any] = {"samples": samples}
    if sockets.first_image or _knows_places(sockets):
        latent[BATCH_INDEX] = list(checked.drawing.numbers)
    return io.NodeOutput(latent, report)


def run_choice(
    choice: Choice, loaded: Loaded[Any], condition: Any, seed: Any, draft: Any = None, bar: Bar | None = None
) -> io.NodeOutput:
    """Run a sampler on the values of sockets; ``loaded`` was checked by :func:`expect_loaded`."""
    expect_runnable(choice, loaded, draft)

    settings = choice.settings(facts_of(loaded))
    return run(choice.entry, loaded, settings, seed, Sockets(condition, draft=draft), bar)


def draw_images(
    choice: Choice, loaded: Loaded[Any], condition: Any, seed: int, draft: Any = None, bar: Bar | None = None
) -> tuple[np.ndarray, Report]:
    """Images uint8 [N, H, W, 3] and the report of :func:`run_choice`."""
    latent, report = run_choice(choice, loaded, condition, seed, draft, bar).result

    assert loaded.vae is not None
    return to_bytes(loaded.vae.decode(latent["samples"])), report


def warm_up(loaded: Loaded[Any], condition: Any) -> None:
    """Begin the plain sampler, untimed, as :func:`runs.batches.warm_up`."""
    plain = choose(baseline_of(loaded), {})
    settings = plain.entry.family.short(plain.settings(facts_of(loaded)))

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


def _read_codes(condition: AnyCondition, loaded: Loaded[Any]) -> AnyCondition:
    """Turn semantic codes into features with the model's TA-Tok, which is on the device only for that."""
    if not isinstance(condition, CodeCondition) or TA_TOK not in loaded.parts:
        return condition

    reader = loaded.parts[TA_TOK]
    load_to_device(reader, _READER_BYTES)
    with enough_memory(READING):
        made = features_of(condition, reader.model)

    device = host.devices.get_compute_device()
    return FeatureCondition(tuple(rows.to(device) for rows in made.features), made.names)


_image_reader = ModelCache(host.devices.get_compute_device, host.devices.get_offload_device)


def placed_reader(loaded: Loaded[Any]) -> ImageReader:
    """What reads images for a Janus, on the device with the VQ tokenizer of the same loader."""
    vae = loaded.vae
    path = loaded.model.vision_file

    def load() -> Any:
        operations = host.operations.suited(host.devices.get_compute_device())
        more: dict[str, Any] = {} if operations is None else {"operations": operations}
        dtype = dtype_name(choose_dtype(AUTO, host.devices.get_compute_device(), "janus"))
        # The cached reader must not keep the tokenizer of a loader that is gone.
        tokenizer = cast(VQModel, proxy(vae.tokenizer))
        return load_janus_vision(path, tokenizer, dtype, host.devices.get_offload_device(), **more)

    reader = _image_reader.get(path, load)
    side = reader.model.side
    memory = _READER_BYTES + vae.memory_used_encode((1, 3, side, side), vae.vae_dtype)
    host.memory.load_weights([reader.patcher, vae.patcher], memory)
    # The same file may have been loaded again, with another tokenizer.
    return replace(reader.model, vq=vae.tokenizer)


def _read_pictures(condition: AnyCondition, loaded: Loaded[Any]) -> AnyCondition:
    """Read the images of a condition with what a Janus has for that; it is on the device only for that."""
    if not isinstance(condition, ImagePromptCondition):
        return condition

    with enough_memory(READING):
        return read_images(condition, placed_reader(loaded))


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
    used = in_words(kind, _remarkable(kind, report.settings, own or {}))
    told = host.text.output([one_line(report)], [unknown, *warnings, no_gain(report)], f"{used}.", prompts)

    write_reports(node, [report])
    return io.NodeOutput(latent, report, ui=told)


def _remarkable(kind: type, settings: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without the advanced ones that are the model's own, ``own``."""
    found = dict(settings)
    for name, (default, about) in knobs(kind).items():
        if about.advanced and default is None and found.get(name) == own.get(name):
            found.pop(name, None)
    return found
