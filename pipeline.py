"""The pipeline: a model with its decoder and everything that reads its labels or prompts, for scripts and notebooks.

    pipe = fastar_nodes.load("demo")
    images, report = pipe("cat", sampler="fasthybrid", preset="balanced", seed=7)

The same model, settings and seed give the same images as ``python -m fastar_nodes compare``.
"""

from __future__ import annotations

import inspect
import logging
import operator
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from .errors import UserError, unknown
from .memory import enough_memory
from .model_loaders.files.wrappers import WEIGHTS
from .model_loaders.janus.squares import squared
from .model_loaders.kinds import DTYPES
from .networks.autoencoder import KLModel, VQModel
from .networks.bitdance import BlockModel
from .networks.llama import TokenModel
from .networks.mar import MARModel
from .networks.speed import SPEEDS, choose
from .networks.torch_state import in_own_state, own_state
from .reports.record import Report
from .runs import inpainting, loading
from .runs.answers import AnswerSettings, answer, expect_reader
from .runs.choice import Choice
from .runs.conditions import ConditionBuilder
from .runs.drawing import Drawing, decode
from .runs.images import AnyImage, batch_of, masks_given, one_for_each, scaled
from .runs.limits import MOST_IMAGES, SEEDS, whole
from .runs.loading import AUTO, ENCODER, Drafts, Ready, Source
from .runs.presets import BALANCED, CUSTOM
from .runs.presets import names as preset_names
from .runs.presets import values as preset_values
from .runs.registry import SAMPLERS, Entry, find
from .samplers.conditioning import KINDS, AnyCondition
from .samplers.editing import Edit
from .samplers.engine import Sampled, Step, finish
from .samplers.settings import check_removed, knobs, settings_from, unknown_setting_error
from .samplers.tokens.tar import TarPromptSettings
from .samplers.tokens.token_noise import TokenNoise

P = ParamSpec("P")
R = TypeVar("R")

# A seed that nobody chose has ten digits at most, to be typed again.
_NEW_SEEDS = 1 << 32

Prompt = str | int | Sequence[str | int]
Callback = Callable[[Step], object]
_log = logging.getLogger(__name__)


def load(
    model: str | Path = "demo",
    *,
    decoder: str | Path = AUTO,
    draft: str | Path = AUTO,
    upscale_model: str | Path = AUTO,
    tar: str | Path = AUTO,
    ta_tok: str | Path = AUTO,
    encoder: str | Path = ENCODER,
    device: str | torch.device = AUTO,
    dtype: str | torch.dtype = AUTO,
    speed: str = AUTO,
    grid: int | None = None,
    weights: str = AUTO,
    models: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Pipeline:
    """Load a model with its decoder. What else it needs is loaded when it is first needed.

    Args:
        model: an entry of the catalogue ("demo", "demo-llamagen", "demo-dtok", "demo-hybrid", "mar-base", ...) or a
            file.
        decoder: KL or VQ autoencoder, an entry or a file; "auto" is the one that the model was trained with.
        draft: draft model of cspd and mulosd, an entry or a file; "auto" is the catalogue's.
        upscale_model: what enlarges the draft of mulosd: "bicubic", the file of latent samplers, or the file of a
            super-resolution model, which the package spandrel reads; "auto" is built-in latent samplers where they
            fit, else "bicubic".
        tar: language model of Tar, for de-tokenizers; "auto" is the demo's, or tar-1.5b.
        ta_tok: TA-Tok, for de-tokenizers; "auto" is the de-tokenizer's.
        encoder: text encoder of LlamaGen's text-to-image models.
        device: "auto" is CUDA, then MPS, then the CPU.
        dtype: of the weights: "auto", "fp32", "bf16", "fp16", "int8" or "fp8" (8 bits in the blocks), "int4" or
            "int4-g64" (fewer), or a torch.dtype.
        speed: "auto" launches repeated work as CUDA graphs where there is a CUDA device, with the results of "plain",
            which launches it step by step; "compile" also uses torch.compile.
        grid: tokens along one side of a token model; None is what its file states.
        weights: "ema" or "trained" of a training's file that holds both; "auto" is the averaged ones.
        models: folder of weight files, where downloads go too; None is ComfyUI's models/fastar or ~/.cache/fastar.
        progress: called with the bytes received and their total (0 if unknown) during a download.

    Raises:
        UserError: a file is missing or does not fit, a download failed, or the device or dtype cannot be used.
    """
    # 1. Check the arguments.
    folder = loading.models_folder(models)
    precision = _dtype(dtype)
    if grid is not None:
        grid = whole(grid, "grid", 2, 128)
    _expect_choice("speed", speed, SPEEDS)
    _expect_choice("weights", weights, WEIGHTS)

    # 2. Load the model with its decoder.
    def find_file(choice: str, family: str) -> Path:
        return loading.find_file(choice, family, folder, progress)

    source = Source(find_file, loading.choose_device(str(device)), precision, speed=speed)
    choice = str(model)
    family = loading.family_of_choice(choice, source)
    ready = loading.load(family, choice, source, str(decoder), grid, weights)

    # 3. What else it needs is loaded later.
    readers = ConditionBuilder(source, str(tar), str(ta_tok), str(encoder), warn=_log.warning)
    pipe = Pipeline(ready, Drafts(source, str(draft), choice, str(upscale_model)), readers)

    # 4. An argument that the model does not use would be ignored without a word.
    given = {
        "grid": grid,
        "draft": str(draft),
        "upscale_model": str(upscale_model),
        "tar": str(tar),
        "ta_tok": str(ta_tok),
        "encoder": str(encoder),
    }
    own = [SAMPLERS[name] for name in pipe.samplers]
    nobody = f"{ready.model.name} does not use"
    loading.expect_used(given, own, [ready.condition], nobody, [ready.kind.one_grid])

    return pipe


def _dtype(dtype: str | torch.dtype) -> str:
    """The name of a dtype; one that no weights can have is refused with the others."""
    names = {kind: name for name, kind in DTYPES.items()}
    return names.get(dtype, str(dtype)) if isinstance(dtype, torch.dtype) else dtype


def _takes(other: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Give a method that passes its arguments on the signature of the one that takes them, so that they stand once."""

    def with_signature(method: Callable[..., R]) -> Callable[P, R]:
        taken = inspect.signature(other)
        returned = inspect.signature(method).return_annotation
        method.__signature__ = taken.replace(return_annotation=returned)  # type: ignore[attr-defined]
        return method

    return with_signature


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A model with its decoder; made by :func:`load`. Call it to generate images."""

    ready: Ready
    drafts: Drafts
    readers: ConditionBuilder

    @property
    def model(self) -> MARModel | TokenModel | BlockModel:
        """The model, for the samplers as functions."""
        return self.ready.model

    @property
    def decoder(self) -> KLModel | VQModel:
        """The decoder of its latents or codes."""
        assert self.ready.decoder is not None, "load() loads it"
        return self.ready.decoder

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.ready.device

    def to(self, device: str | torch.device) -> Pipeline:
        """Move all weights to another device, also of what is loaded later; returns this pipeline.

        ``device``: as in :func:`load`. Weights keep their dtype: only :func:`load` chooses one.

        Raises:
            UserError: the device cannot be used or has too little memory, or does not hold the dtype of the weights.
        """
        source = self.readers.files
        moved = replace(
            source, device=loading.choose_device(str(device)), dtype=source.precision_name(self.ready.family)
        )
        moved.precision(self.ready.family)
        nets = [value for value in vars(self.model).values() if isinstance(value, nn.Module)]
        nets.append(self.decoder.net)
        choose(self.model.net, source.speed, moved.device)  # whether it can be compiled there

        with enough_memory(f"device: {moved.device} has too little memory for this model; choose a different device."):
            try:
                for part in nets:
                    part.to(moved.device)
            except BaseException:
                for part in nets:  # a part of the weights may have moved
                    part.to(source.device)
                raise

        self.drafts.use(moved)
        self.readers.use(moved)
        return self

    @property
    def samplers(self) -> list[str]:
        """Names of the samplers that suit the model; the first one is the plain sampler."""
        suited = [entry for entry in SAMPLERS.values() if self.ready.family in entry.families]
        suited.sort(key=lambda entry: not entry.baseline)
        return self.ready.kind.own_samplers(self.model, [entry.name for entry in suited])

    def __repr__(self) -> str:
        return f"<Pipeline {self.ready.choice!r}: {self.model.name}, {self.decoder.name}, on {self.device}>"

    def sample(
        self,
        prompt: Prompt,
        *,
        sampler: str | None = None,
        preset: str = BALANCED,
        seed: int | None = None,
        images: int = 1,
        first: int = 0,
        negative: str | None = None,
        prompt_settings: Mapping[str, Any] | None = None,
        image: AnyImage | Sequence[AnyImage] | None = None,
        mask: AnyImage | Sequence[AnyImage] | None = None,
        freedom: float | None = None,
        callback: Callback | None = None,
        **settings: Any,
    ) -> Sampled:
        """Generate latents, or codes for a token model, without decoding them.

        Args:
            prompt: a prompt, or several in a list; for models of classes a class name or id, several of them in a list
                or separated by commas.
            sampler: one of :attr:`samplers`; None for the plain one.
            preset: "exact", "balanced" (as on the command line and on new nodes), "fast", for plain MAR "few steps", or
                "custom" for the values that the model's file and the paper recommend.
            seed: 0 to 2^64 - 1; None takes a new seed, which the report names. Image i uses the noise of
                (seed, first + i), so it is the same alone and in a batch.
            images: images of each prompt or label, one after the other.
            first: index of the first image: ``first=3, images=1`` generates image 3 of a batch alone.
            negative: what guidance leads away from: for Harmon and UniPic a whole instruction, for NextStep a text.
            prompt_settings: settings of Tar's language model, see :class:`TarPromptSettings`.
            image: with ``mask`` what inpainting starts from: an image, or latents or codes of :meth:`sample`; one, or
                one for each image. Without it, for a Janus or NextStep that was trained to edit: what the prompt
                changes, an image of any size, or one for each prompt. The model regenerates the whole image, Janus at
                384 x 384 pixels, NextStep at its *width* and *height*.
            mask: the part of ``image`` to sample again: a grey image or [H, W] of any size, black or transparent where
                the image stays; one, or one for each image. A token is sampled again if any part of it is not black, so
                a soft edge is sampled again too.
            freedom: for an image without a mask, of a Janus alone, 0 to 10: how much more the guidance counts what the
                image shows than its very pixels; at 0 they count most, and less is computed. None: 5, as published.
            callback: called with the partial result after every step; its ``done`` and ``total`` count steps.
            settings: of the sampler; they take precedence over the preset.

        Returns:
            ``(latents, report)`` with fp32 [B, C, h, w], or ``(codes, report)`` with int64 [B, h, w].

        Raises:
            UserError: an unknown name of a sampler, preset, setting or label, a value out of range, a missing draft
                model, an edit that does not fit, insufficient memory, or values that are not finite.
        """
        # 1. Mistakes in names and numbers, before anything else is loaded.
        entry = self._entry(sampler)
        made = self.settings(entry.name, preset, **settings)
        seed = secrets.randbelow(_NEW_SEEDS) if seed is None else whole(seed, "seed", 0, SEEDS - 1)
        images = whole(images, "images", 1, MOST_IMAGES)
        first = whole(first, "first", 0, SEEDS - 1)

        # 2. The condition, with an image to edit or without, and the part to sample again.
        edits = image is not None and mask is None and self.ready.kind.reads_images
        condition = self.condition(
            prompt,
            images=images,
            seed=seed,
            first=first,
            negative=negative,
            prompt_settings=prompt_settings,
            image=image if edits else None,
            freedom=freedom,
        )
        edit = None
        if not edits:
            with enough_memory(
                "mask: there is not enough memory for this image and its mask; give a smaller image and mask."
            ):
                edit = self._edit(entry, image, mask, made)
        # 3. The sampler with its draft model, in parts if memory is insufficient for the whole batch.
        numbers = range(first, first + len(condition))
        drawing = Drawing(entry, self.model, made, condition, seed, numbers, edit)
        drawing.check(self.device, "images")
        drawing = replace(drawing, **loading.beside(entry, self.ready, self.drafts))
        return finish(drawing.steps(), callback)

    @_takes(sample)
    def __call__(self, prompt: Prompt, **arguments: Any) -> tuple[list[Image.Image], Report]:
        """Generate images. Arguments and errors are those of :meth:`sample`.

        An ``image`` to edit may have any size and keeps it: a square around the mask is cut out for the model, and what
        is generated is put back, in the colours around the mask. Pixels outside the mask stay the same, except for a
        soft edge of 8 pixels. Of latents or codes, the whole image is decoded.

        Returns:
            The images in the order of the prompts, and one report of all of them.
        """
        image, mask = arguments.get("image"), arguments.get("mask")
        if image is None or mask is None or isinstance(image, Tensor):
            result = self.sample(prompt, **arguments)
            pixels = decode(self.ready, result).numpy()
        else:
            result, pixels = self._in_own_image(prompt, image, mask, arguments)

        return [Image.fromarray(image) for image in pixels], result.report

    def _in_own_image(
        self, prompt: Prompt, image: Any, mask: Any, arguments: Mapping[str, Any]
    ) -> tuple[Sampled, np.ndarray]:
        """What was sampled in a crop of an image, and the whole images with it, uint8 [B, H, W, 3]."""
        told = "image: there is not enough memory to edit this image; give a smaller image."
        with own_state(), enough_memory(told):
            given = torch.tensor(batch_of(image))
            original = given.movedim(-1, 1).float() / 255
            area = inpainting.fitted(masks_given(mask), (original.shape[2], original.shape[3]))
            crop = inpainting.crop_around(area)

            part = crop.of(given.movedim(-1, 1)).movedim(1, -1).numpy()

        result = self.sample(prompt, **{**arguments, "image": part, "mask": crop.of(area)})

        with own_state(), enough_memory(told):
            drawn = decode(self.ready, result).movedim(-1, 1).float() / 255
            whole = inpainting.put_back(original, drawn, area, crop)
            return result, (whole.movedim(1, -1).clamp(0, 1) * 255).round().to(torch.uint8).numpy()

    def settings(self, sampler: str | None = None, preset: str = BALANCED, **settings: Any) -> Any:
        """The settings of a sampler on this model, for example to call the sampler as a function.

        A later source of a setting takes precedence: the default, the model's file, the preset, and ``settings``.

        Raises:
            UserError: an unknown sampler, preset or setting, or a value out of range.
        """
        entry = self._entry(sampler)
        known = preset_names(entry.settings)
        if preset not in known:
            raise unknown("preset", f"there is no preset {preset!r}", preset, known)

        for name, value in settings.items():
            if name not in knobs(entry.settings) and not check_removed(entry.settings, name, value):
                raise unknown_setting_error(entry.settings, name, f"{entry.name} has no such setting")

        choice = Choice(entry, preset, settings)
        made = choice.settings(self.ready.facts)
        entry.check(self.model, made)
        return made

    def presets(self, sampler: str) -> dict[str, dict[str, Any]]:
        """The presets of a sampler on this model: name of the preset to the settings that it fills in.

        Raises:
            UserError: an unknown sampler.
        """
        kind = self._entry(sampler).settings
        facts = self.ready.facts

        out: dict[str, dict[str, Any]] = {}
        for preset in preset_names(kind):
            if preset == CUSTOM:
                continue

            made = asdict(self.settings(sampler, preset))
            filled_in = preset_values(kind, preset, facts.demo, facts.width)
            out[preset] = {name: made[name] for name in filled_in}

        return out

    @in_own_state
    def condition(
        self,
        prompt: Prompt,
        *,
        images: int = 1,
        seed: int = 0,
        first: int = 0,
        negative: str | None = None,
        prompt_settings: Mapping[str, Any] | None = None,
        image: AnyImage | Sequence[AnyImage] | None = None,
        freedom: float | None = None,
    ) -> AnyCondition:
        """What a sampler is conditioned on, for the samplers as functions. Arguments as in :meth:`sample`; ``image`` is
        what the prompt changes, for a model that was trained to edit.

        The seed decides the codes that Tar's language model writes, and nothing for other models.

        Raises:
            UserError: an unknown label, a prompt that the model cannot read, or more than 1024 images.
        """
        # 1. Arguments that the model does not use, and settings that do not exist.
        kind = self.ready.condition
        if negative is not None and kind != "prompt":
            raise UserError(
                f"negative: only Harmon, UniPic and NextStep read a negative text. {self.model.name} reads only "
                f"{KINDS[kind]}; leave negative out."
            )

        if prompt_settings and kind != "features":
            raise UserError(
                f"prompt_settings: these settings are for Tar's language model, which {self.model.name} does not use; "
                "leave them out."
            )

        if image is not None and not self.ready.kind.reads_images:
            raise UserError(
                f"image: {self.model.name} reads {KINDS[kind]} and cannot edit an image; load Janus-4o or "
                "NextStep-1-Large-Edit."
            )
        if image is not None and negative is not None:
            raise UserError(
                f"negative: when {self.model.name} edits an image, it uses its own negative text instead of yours; "
                "leave negative out."
            )
        if freedom is not None and image is None:
            raise UserError(
                "freedom: this option is only for editing an image by prompt; give the image to edit, or leave "
                "freedom out."
            )

        asked = prompt_settings or {}
        known = knobs(TarPromptSettings)
        for name in asked:
            if name not in known:
                raise unknown(name, "Tar's language model has no such setting", name, known)
        settings_from(TarPromptSettings, asked)

        # 2. Labels.
        prompts = _in_list(prompt)
        if kind == "class":
            text = "\n".join(str(label) for label in prompts)
            return self.readers.labels(self.ready, text, images, "prompt", MOST_IMAGES)

        # 3. Prompts; ``images`` images of each follow one another.
        texts: list[str] = []
        for one in prompts:
            if not isinstance(one, str):
                raise UserError(f"prompt: {one!r} is not a text, but {self.model.name} reads prompts; give a text.")
            texts.append(one)
        count = len(texts) * images
        if not 1 <= count <= MOST_IMAGES:
            raise UserError(f"images: all prompts together ask for {count} images; ask for 1 to {MOST_IMAGES}.")

        if image is not None:
            with enough_memory(
                "image: there is not enough memory to read the image; load the model on a different "
                "device, or with a smaller dtype."
            ):
                return self.readers.image_prompts(self.ready, texts, image, freedom, images)

        self.readers.seed = seed
        self.readers.asked = asked
        self.readers.unconditional = negative
        return self.readers.prompts(self.ready, [text for text in texts for _ in range(images)], first)

    @in_own_state
    @enough_memory(
        "image: there is not enough memory to answer; load the model on a different device, or with a smaller dtype."
    )
    def ask(self, image: AnyImage, question: str, *, temperature: float = 0.0, limit: int = 512, seed: int = 0) -> str:
        """Ask a Janus about an image, for example to describe it.

        Args:
            image: as in :meth:`sample`, of any size.
            question: a question or a task.
            temperature: 0 always takes the likeliest word, above 0 words are drawn.
            limit: most tokens of the answer, which ends before, when it is complete.
            seed: decides the drawn words.

        Raises:
            UserError: a model that reads no images, or a value out of range.
        """
        settings = settings_from(AnswerSettings, {"temperature": temperature, "limit": limit})
        seed = whole(seed, "seed", 0, SEEDS - 1)
        model: Any = self.model
        expect_reader(model)
        ids = model.question(question)
        (pixels,) = one_for_each(image, 1)

        reader = self.readers.image_reader(self.ready)
        rows = reader.look(squared(pixels, reader.side, reader.least))
        head = self.readers.word_head(self.ready)
        noise = TokenNoise(seed, [0])
        return finish(answer(model, head, [rows], ids, settings.words, settings.limit, noise)).text

    def decode(self, latents: Tensor) -> np.ndarray:
        """Images uint8 [B, H, W, 3] of latents or codes, as :meth:`sample` returns them.

        Raises:
            UserError: latents that do not fit or are not finite, pixels that are not finite, or insufficient memory.
        """
        return self.decoder.decode(latents).numpy()

    @in_own_state
    @enough_memory(
        "image: there is not enough memory to encode the image; give a smaller image, or choose a different device."
    )
    @torch.no_grad()
    def encode(self, image: AnyImage | Sequence[AnyImage], grid: tuple[int, int] | None = None) -> Tensor:
        """Latents fp32 [B, C, h, w], or codes int64 [B, h, w] for a token model, of an image or several of one size.

        The image is scaled to the size that the decoder encodes; the demo's decode to one that is four times larger.

        Args:
            image: a PIL image, the path of an image file, or pixels uint8 [H, W, 3] or [B, H, W, 3]; or several of
                one size in a list.
            grid: latents along the height and the width, for a BitDance of several sizes; None: of the usual one.

        Raises:
            UserError: an image of another form, features that are not finite, or insufficient memory.
        """
        batch = batch_of(image)

        net: Any = self.decoder.net
        weight = next(net.parameters())
        height, width = grid or self._grid
        size = (height * net.config.stride, width * net.config.stride)
        pixels = scaled(torch.tensor(batch).permute(0, 3, 1, 2).float() / 255, size)
        return self.decoder.encode((pixels * 2 - 1).to(weight.device, weight.dtype))

    @property
    def _grid(self) -> tuple[int, int]:
        """Latents or codes along the height and the width of an image."""
        return self.ready.kind.latents(self.model)

    def _entry(self, sampler: str | None) -> Entry:
        """The sampler of that name. Raises UserError: there is none, or it is for other models."""
        suited = self.samplers
        if sampler is None:
            return SAMPLERS[suited[0]]

        try:
            entry = find(str(sampler))
        except UserError:
            raise unknown("sampler", f"there is no sampler {sampler!r}", sampler, suited) from None

        if entry.name not in suited:
            demos = entry.demos(entry.family.name)
            remedy = f'load a different model, for example with load("{demos[0]}"), or choose' if demos else "choose"
            raise UserError(
                f"sampler: {entry.name} works with {entry.models}, but not with {self.model.name}; {remedy} one of "
                f"{', '.join(suited)}."
            )
        return entry

    @in_own_state
    def _edit(self, entry: Entry, image: Any, mask: Any, settings: Any) -> Edit | None:
        """The part of an image to sample again; None for whole new images."""
        if image is None and mask is None:
            return None

        if image is None or mask is None:
            raise UserError("mask: inpainting needs both an image and a mask; give both, or neither.")
        if entry.needs_up_sampler:
            raise UserError(f"mask: {entry.name} samples whole images only; choose a different sampler for inpainting.")

        start = image
        if not isinstance(start, Tensor):
            start = self.encode(start, self.ready.kind.latents(self.model, settings))
        codes = self.ready.kind.codes
        if start.ndim != (3 if codes else 4) or start.is_floating_point() == codes:
            form = "codes int64 [1 or batch, h, w]" if codes else "latents [1 or batch, C, h, w]"
            raise UserError(
                f"image: the tensor has the dtype {start.dtype} and the shape {list(start.shape)}; give an "
                f"image, or the result of sample(): {form}."
            )
        if codes:
            cast(VQModel, self.ready.decoder).expect_entries(start, "image")

        return Edit(start, masks_given(mask))


def _in_list(prompt: Any) -> list[str | int]:
    """The prompts or class ids of an argument, of which NumPy's whole numbers are ids too.

    Raises:
        UserError: a value that is neither a text nor a whole number.
    """
    if isinstance(prompt, str):
        return [prompt]

    try:
        is_number = hasattr(prompt, "__index__") and getattr(prompt, "ndim", 0) == 0
        several = [prompt] if is_number else list(prompt)
        return [one if isinstance(one, str) else operator.index(one) for one in several]
    except TypeError:
        shown = f"{prompt!r}"[:60]
        raise UserError(
            f"prompt: {shown} is neither a text nor a class id; give a prompt or a class id, or a list of them."
        ) from None


def _expect_choice(field: str, name: str, choices: Sequence[str]) -> None:
    """Raise a UserError if an argument of :func:`load` is none of its choices."""
    if name not in choices:
        raise unknown(field, f"{name!r} is unknown", name, choices)
