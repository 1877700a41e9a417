"""Running a sampler in ComfyUI, for every node that samples.

A run takes three steps, in this order:

1. check: the values of the sockets become a :class:`Run`. Errors are raised here, before anything is loaded.
2. estimate: the memory that the run needs, from shapes alone.
3. run: the weights are loaded with that much memory free, and the sampler is driven to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from comfy_api.v0_0_2 import io
from torch import Tensor

from ..errors import UserError
from ..memory import enough_memory
from ..model_loaders.autoencoders.latent_samplers import expect_fitting
from ..model_loaders.kinds import KINDS
from ..model_loaders.upscalers import enlarges_rgb, upscaler_name
from ..networks.latent_samplers import LatentSamplersModel
from ..networks.tar import TarModel
from ..networks.torch_state import in_own_state
from ..reports.record import Report
from ..reports.summary import one_line
from ..runs import registry
from ..runs.baseline import no_gain
from ..runs.batches import run_beginning
from ..runs.choice import Choice, choose
from ..runs.drawing import Drawing
from ..runs.images import to_bytes
from ..runs.labels import labels_for
from ..runs.loading import built_in_latent_samplers
from ..runs.memory import DECODE
from ..runs.registry import SAMPLERS, Entry, family_of
from ..samplers.conditioning import (
    AnyCondition,
    ClassCondition,
    CodeCondition,
    FeatureCondition,
    ImagePromptCondition,
    PromptCondition,
    TextCondition,
    expect_editor,
    expect_kind,
    expect_null_prompt,
)
from ..samplers.settings import in_words, knobs
from ..samplers.tokens.mulosd import grid_ratio
from ..samplers.tokens.mulosd.drafting import LatentUpSampling, PixelUpSampling, UpSampling
from . import graph, host
from .caches import checked_cache
from .host.loaded import Loaded, to_device
from .latents import BATCH_INDEX, asked, knows_places
from .metadata import write_reports
from .preview import Bar, drive
from .readers import READING, edit_codes, read_codes, read_pictures
from .schema import checked_seed, describe
from .sent import facts_of
from .sockets import LabelText, expect_condition, expect_kind_on, kind_on
from .vae import FastARVAE, mark

# A sampler's generator.
Steps: TypeAlias = Generator[Any, None, Any]

# Names of nodes in messages.
CONDITIONS = "Class Label, Prompt, Image and Prompt, LlamaGen Prompt, Tar Prompt or Image to Codes"
# Pixels that pass through the decoder at once when a draft is enlarged.
_PIXELS = 1 << 21


def runnable() -> dict[str, Entry]:
    """The samplers that run here by name: all but second names."""
    return registry.first_names()


# ------------------------------------------------------------------------------------------------ models on sockets


def loaders_of(kind: str = "") -> str:
    """Names of the loaders of models of a kind of families, see :attr:`.Family.kind`; "" for any."""
    names = [KINDS[family.files].loader for family in registry.FAMILIES.values() if kind in ("", family.kind)]
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def expect_loaded(value: Any, field: str, kind: str = "") -> Loaded[Any]:
    """Check that a socket holds a model that draws, with its decoder if it draws codes.

    ``kind``: of the families whose models are accepted; "" for any.
    """
    loaders = loaders_of(kind)
    loaded: Loaded[Any] = expect_kind_on(value, (Loaded.kind,), field, loaders)
    family = registry.FAMILIES.get(loaded.model.family)
    if family is None or kind and family.kind != kind:
        raise UserError(f"{field}: it got {describe(loaded)}; connect the output of {loaders}.")

    if family.codes and loaded.vae is None:
        raise UserError(
            f"{field}: this model comes without its decoder; connect the model output of {loaders} to {field}, with no "
            "other node between them."
        )
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
        raise UserError(f"sampler: {entry.name} does not run in ComfyUI; choose one of {', '.join(runnable())}.")

    family = family_of(loaded.model)
    if entry.family.kind != family.kind:
        names = [name for name, other in runnable().items() if other.family.kind == family.kind]
        suited = names[0] if len(names) == 1 else f"one of {', '.join(names)}"
        raise UserError(
            f"sampler: {entry.name} works with {entry.models}, but the connected model is {describe(loaded)}; choose "
            f"{suited}."
        )

    if entry.needs_draft and draft is None:
        raise UserError(
            f"draft: {entry.name} needs a draft model; connect a second model of the same family to the input draft."
        )


# ------------------------------------------------------------------------------------------------ choices and settings


def baseline_of(loaded: Loaded[Any]) -> str:
    """Name of the plain sampler of a model; of a PAR, the sampler that it was trained for."""
    family = family_of(loaded.model)
    of_kind = {name: entry for name, entry in runnable().items() if entry.family.kind == family.kind}
    own = family.own_samplers(loaded.model, list(of_kind))
    return next((name for name in own if of_kind[name].baseline), own[0])


def baseline_choice(choice: Choice, loaded: Loaded[Any]) -> Choice:
    """The plain sampler of a model with the settings that it shares with a choice."""
    plain = SAMPLERS[baseline_of(loaded)]

    known = knobs(plain.settings)
    shared = {name: value for name, value in choice.values.items() if name in known}
    return Choice(plain, values=shared)


def expect_suited_settings(choice: Choice, loaded: Loaded[Any]) -> None:
    """Check the settings of a choice against a model, where it runs later."""
    choice.entry.check(loaded.model, choice.settings(facts_of(loaded)))


# ------------------------------------------------------------------------------------------------ conditions on sockets


def as_labels(labels: LabelText, label_set: str) -> ClassCondition:
    """Class labels for a model of that label set."""
    return labels_for(labels.text, label_set, labels.repeat, field="condition")


def texts_of(condition: Any) -> tuple[str, ...]:
    """The prompts of a condition that the sampled model reads itself; none of other conditions."""
    return tuple(condition.texts) if kind_on(condition) == PromptCondition.kind else ()


def as_condition(value: Any, model: Any) -> AnyCondition:
    """The condition on a socket for a model; raises a UserError if it is of a kind that the model does not read."""
    made = expect_condition(value, CONDITIONS)
    if isinstance(made, LabelText):
        expect_kind(ClassCondition, model.condition, model.name)  # type: ignore[arg-type]
        return as_labels(made, model.label_set)

    if isinstance(made, ImagePromptCondition):
        expect_editor(made, model)
        return made
    if not turned_into_features(made.kind, model):
        expect_kind(made, model.condition, model.name)
    if isinstance(made, PromptCondition) and not family_of(model).reads_negatives:  # with its own null prompt
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
    latent_samplers: Any = None
    first_image: int = 0


@dataclass(frozen=True)
class Room:
    """What a run needs on the device."""

    memory: float  # bytes, beside the weights
    latents: tuple[int, int, int, int]  # shape of the decoder's latents [B, C, h, w], for previews
    others: list[host.memory.ModelPatcher] = field(default_factory=list)  # networks beside the model's


@dataclass(frozen=True)
class Run(Drawing):
    """A checked run of a sampler on the models of loaders. An edit starts from latents."""

    loaded: Loaded[Any] = field(kw_only=True)
    loaded_draft: Loaded[Any] | None = None
    # What enlarges a draft, at most one of them; without both bicubic interpolation does.
    upscale_model: Any = None
    latent_samplers: Loaded[LatentSamplersModel] | None = None

    def estimate(self) -> Room:
        """What the run needs."""
        memory: float = self.working()

        vae = self.loaded.vae
        height, width = self.family.latents(self.model, self.settings)
        others = [] if self.loaded_draft is None else list(self.loaded_draft.patchers)
        if self.latent_samplers is not None:
            others += self.latent_samplers.patchers
        elif self.entry.needs_up_sampler:
            # The draft is enlarged between the decoder and the encoder.
            side = height * vae.downscale_ratio
            at_once = max(1, min(self.images, _PIXELS // side**2))
            memory += at_once * vae.memory_used_encode((1, 3, side, side), vae.vae_dtype)
            others.append(vae.patcher)

        channels = 0 if vae is None else vae.latent_channels
        return Room(memory, (self.images, channels, height, width), others)

    def start(self) -> tuple[Steps, FastARVAE | None]:
        """Read the condition, load the weights, and begin the sampler.

        Returns its steps, and the decoder of previews if there are any.
        """
        room = self.estimate()
        condition = read_pictures(read_codes(self.condition, self.loaded), self.loaded)

        def place() -> FastARVAE | None:
            return to_device(self.loaded, room.memory, room.latents, room.others)

        vae = place()
        edit = self.edit
        if edit is not None and self.family.codes:
            edit = edit_codes(edit, self.loaded.vae)

        up_sampler = self._up_sampling(place) if self.entry.needs_up_sampler else None
        return replace(self, condition=condition, edit=edit, up_sampler=up_sampler).steps(warm=True), vae

    def _up_sampling(self, place: Callable[[], Any]) -> UpSampling:
        """What enlarges the draft; ``place`` loads the run's networks again after an upscale model."""
        tokenizer = self.loaded.vae.tokenizer
        if self.latent_samplers is not None:
            return LatentUpSampling(tokenizer, self.latent_samplers.model)
        if self.upscale_model is None:
            return PixelUpSampling(tokenizer)

        enlarge = host.images.upscaler(self.upscale_model, place)
        return PixelUpSampling(tokenizer, enlarge, upscaler_name(self.upscale_model))

    def latents(self, step: Any) -> Tensor:
        """Latents [B, C, h, w] of a step or of the result, a LATENT; of codes their vectors."""
        if self.family.codes:
            return self.loaded.vae.vectors(step.latents)
        return step.latents


def check(entry: Entry, loaded: Loaded[Any], settings: Any, seed: int, sockets: Sockets) -> Run:
    """Check the inputs of a run; nothing is computed, and only built-in latent samplers are loaded."""
    model = loaded.model
    family = family_of(model)

    # 1. Model and settings.
    entry.check(model, settings)

    # 2. The condition, and the part of an image to draw again.
    whole = as_condition(sockets.condition, model)
    condition, edit, numbers = asked(whole, sockets.latent_image, sockets.mask, sockets.first_image, loaded, settings)
    checked = Run(entry, model, settings, condition, seed, numbers, edit, loaded=loaded)
    checked.check(host.devices.get_compute_device(), "condition")

    # 3. What else the sampler takes.
    draft = None
    if entry.needs_draft:
        draft = expect_loaded(sockets.draft, "draft", family.kind)
        tokenizer, of_draft = (one.vae.tokenizer if family.codes else None for one in (loaded, draft))
        family.expect_draft(model, draft.model, tokenizer, of_draft, entry.title)
    if sockets.cache is not None and not entry.caches:
        raise UserError(f"cache: {entry.title} does not work with LazyMAR's caches; disconnect LazyMAR Cache.")
    cache = checked_cache(sockets.cache, loaded, settings)

    upscale_model = sockets.upscale_model
    if upscale_model is not None and not enlarges_rgb(upscale_model):
        raise UserError(
            f"upscale_model: it got {describe(upscale_model)}; connect the output of Load Upscale Model "
            "with a model for colour images."
        )

    samplers = latent_samplers_of(sockets, loaded, draft) if entry.needs_up_sampler else None

    return replace(
        checked,
        draft=None if draft is None else draft.model,
        cache=cache,
        loaded_draft=draft,
        upscale_model=upscale_model,
        latent_samplers=samplers,
    )


def latent_samplers_of(
    sockets: Sockets, loaded: Loaded[Any], draft: Loaded[Any] | None
) -> Loaded[LatentSamplersModel] | None:
    """The latent samplers of a run of MuLo-SD: those on its socket, or the built-in ones if nothing else enlarges.

    None if an upscale model is connected, or if no built-in ones fit.
    """
    assert draft is not None, "a sampler that enlarges a draft has one"
    tokenizer = loaded.vae.tokenizer
    ratio = grid_ratio(loaded.model, draft.model)

    value = sockets.latent_samplers
    if value is None and sockets.upscale_model is not None:
        return None
    if value is None:
        found = built_in_latent_samplers(tokenizer, ratio, host.devices.get_offload_device())
        return None if found is None else Loaded.of(found)

    if sockets.upscale_model is not None:
        raise UserError(
            "latent_samplers: the input upscale_model is connected too, but the draft can be enlarged in only one way; "
            "disconnect either latent_samplers or upscale_model."
        )
    samplers: Loaded[LatentSamplersModel] = expect_kind_on(
        value, (Loaded.kind,), "latent_samplers", "Load Latent Samplers"
    )
    if samplers.model.family != LatentSamplersModel.family:
        raise UserError(f"latent_samplers: it got {describe(samplers)}; connect the output of Load Latent Samplers.")

    expect_fitting(samplers.model, tokenizer, ratio)
    return samplers


# ------------------------------------------------------------------------------------------------ 3. run


@in_own_state
def run(
    entry: Entry, loaded: Loaded[Any], settings: Any, seed: Any, sockets: Sockets, bar: Bar | None = None
) -> io.NodeOutput:
    """Run a sampler with progress, preview and cancellation, to the latent and the report.

    ``loaded`` was checked to be of the sampler's family; ``bar``: the progress bar of a node with several runs.
    """
    seed = checked_seed(seed)
    checked = check(entry, loaded, settings, seed, sockets)
    steps, vae = checked.start()
    done = drive(steps, vae, checked.latents, bar)

    with enough_memory(READING):
        samples = host.devices.to_output(checked.latents(done))
    mark(samples, entry.family.decoder)

    report: Report = done.report
    report.prompt = host.queue.prompt_id()
    if not entry.family.codes and loaded.vae is not None:
        report.memory[DECODE] = int(loaded.vae.memory_used_decode(samples.shape, loaded.vae.vae_dtype))

    latent: dict[str, Any] = {"samples": samples}
    if sockets.first_image or knows_places(sockets.latent_image):
        latent[BATCH_INDEX] = list(checked.numbers)
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
    """Begin the plain sampler, untimed, as :meth:`.Drawing.warm_up`."""
    plain = choose(baseline_of(loaded), {})
    settings = plain.entry.family.short(plain.settings(facts_of(loaded)))

    steps, _ = check(plain.entry, loaded, settings, 0, Sockets(condition)).start()
    run_beginning(steps)


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
