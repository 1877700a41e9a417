"""Condition nodes: class labels, prompts, and the semantic codes of images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from comfy_api.v0_0_2 import io
from torch import Tensor

from ..errors import UserError
from ..memory import enough_memory
from ..model_loaders.catalogue import hub
from ..model_loaders.files.tokenizer import has_tokenizer
from ..model_loaders.janus.squares import box_of
from ..model_loaders.kinds import DTYPES, choose_dtype
from ..model_loaders.llamagen.captions import prompt_of
from ..model_loaders.llamagen.text import MAX_TOKENS, load_text_encoder
from ..model_loaders.tar.loader import load_ta_tok
from ..networks.hybrid import UNCONDITIONAL
from ..networks.ta_tok import TATokModel
from ..networks.torch_state import in_own_state
from ..runs import registry
from ..runs.conditions import written_codes
from ..runs.images import to_bytes, to_rgb
from ..runs.labels import PICTURE_BOOK, check_labels, label_sets, resolve_labels, split_labels, unknown_words
from ..runs.loading import AUTO, dtype_name
from ..runs.memory.tokens import estimate_prompt
from ..samplers.conditioning import CodeCondition, ImagePromptCondition, PromptCondition, TextCondition
from ..samplers.settings import Settings, knob, settings_from
from ..samplers.tokens.settings import EditSettings
from ..samplers.tokens.tar import DETAILS, TarPrompted, TarPromptSettings
from . import graph, host
from .host.loaded import ModelCache, load_to_device
from .loaders import PRECISION, allow_download, finder, listed, menu, usual
from .preview import drive
from .readers import READING
from .running import expect_language_model
from .schema import (
    CODES,
    IMAGE_PROMPT,
    LABELS,
    PROMPT,
    RECOMMENDS,
    SEED,
    TAR,
    TEXT,
    checked_first_image,
    checked_preset,
    checked_seed,
    expect_image,
    expect_text,
    first_image_widget,
    output,
    preset_widget,
    schema,
    seed_widget,
    setting_widgets,
    validity,
    widgets,
)
from .sent import PLAIN, facts_of, settings_sent
from .sockets import MOST_IMAGES, LabelText

NONE = "none"


def _images(what: str) -> Any:
    """The setting of the number of images; ``what`` is the first sentence of its tooltip."""
    return knob(
        1,
        f"{what}. More images take more time and memory, but one run takes less time than separate runs for the "
        "same images.",
        low=1,
        high=MOST_IMAGES,
        step=1,
    )


def _check_count(field: str, images: int) -> None:
    """Raise a UserError if the input ``field`` asks for too many images."""
    if images > MOST_IMAGES:
        raise UserError(f"{field}: {images} images are too many; ask for at most {MOST_IMAGES}.")


@dataclass(frozen=True)
class LabelSettings(Settings):
    """Widgets of Class Label that are not text."""

    label_set: str = knob(
        AUTO,
        "The list in which FastAR looks up the labels. Usual: auto, which takes the list of the connected model; "
        "picture-book is the demo's list, and imagenet-1k is the list of the official models.",
        choices=(AUTO, *label_sets()),
    )
    images_per_label: int = _images("Number of images of every label")


_LABELS = "cat"


@lru_cache(maxsize=1)
def _names() -> list[str]:
    """The names of all label sets, the demo's first; the editor shows the connected model's."""
    found: list[str] = []
    for names in label_sets().values():
        found += names
    return list(dict.fromkeys(found))


@lru_cache(maxsize=1)
def _sets_of_entries() -> dict[str, str]:
    """Catalogue entries of models of class labels to their label sets."""
    found: dict[str, str] = {}
    for family in registry.FAMILIES.values():
        for entry in hub.entries(family.files) if "class" in family.reads else ():
            found[entry.id] = "picture-book" if entry.built_in else "imagenet-1k"

    return found


def _sets_of_models(node: Any) -> list[str]:
    """Label sets of the models that sample a Class Label; all sets where one of the models is not known."""
    every = list(label_sets())

    found: set[str] = set()
    for inputs in graph.users(node, "condition"):
        label_set = _set_of_model(graph.graph_of(node), inputs)
        if label_set is None:
            return every
        found.add(label_set)

    return sorted(found) or every


def _set_of_model(nodes: Mapping[str, Any], sampler: Mapping[str, Any]) -> str | None:
    """Label set of the model that a sampler with these inputs has; None if its file is not in the catalogue."""
    link = graph.source_of(sampler.get("model", sampler.get("target")))
    if link is None:
        return None

    loader, _ = link
    return set_of_entry(graph.inputs_of(nodes.get(loader)).get("checkpoint"))


def set_of_entry(checkpoint: Any) -> str | None:
    """Label set of the model of a choice in a loader's menu; None if its file is not in the catalogue."""
    if not isinstance(checkpoint, str):
        return None

    entry, _, _ = checkpoint.partition(" (")
    return _sets_of_entries().get(entry)


class ClassLabel(io.ComfyNode):
    more = {
        "labels": (
            "The number of a demo name is its position in this list, from 0 to 9. Capital letters do not matter. If "
            "you write `{cat|boat}`, ComfyUI picks one of the two names for every run."
        ),
        "images_per_label": "A batch has at most 256 images.",
        "add_label": "If you choose a label in *add_label*, the text of *labels* may be empty.",
    }

    @classmethod
    def define_schema(cls) -> io.Schema:
        labels = io.String.Input(
            "labels",
            default=_LABELS,
            optional=True,
            multiline=True,
            dynamic_prompts=True,
            placeholder=f"names or ids, separated by commas or line breaks; the demo knows {', '.join(PICTURE_BOOK)}",
            tooltip="Class names or numbers, separated by commas or line breaks; images_per_label sets the "
            f"number of images of each label. The demo knows these names: {', '.join(PICTURE_BOOK)}. Official models "
            "know the 1000 classes of ImageNet, for example tabby (number 281).",
        )
        add_label = io.Combo.Input(
            "add_label",
            options=[NONE, *_names()],
            default=NONE,
            optional=True,
            tooltip="One more label, which FastAR adds after the text of 'labels'. The menu lists the names that the "
            "connected model knows; to find a name, open the menu and type a part of the name.",
        )

        return schema(
            node_id="FastARClassLabel",
            display_name="Class Label",
            category="FastAR/condition",
            description="Chooses what to generate by the name or number of a class, one label per image; several "
            "labels make a batch. For MAR, LlamaGen, PAR and the ImageNet models of BitDance.",
            search_aliases=["class conditioning", "imagenet class", "label", "category", "prompt"],
            widgets=[labels, *widgets(LabelSettings), add_label],
            outputs=[
                output(LABELS, "condition", "The labels. Connect them to a sampler for MAR, LlamaGen, PAR or BitDance.")
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
        )

    @classmethod
    def validate_inputs(cls, labels: Any = None) -> bool | str:
        """Names that the connected models do not know, or the list that was chosen."""
        chosen = graph.typed(cls, "label_set")
        sets = [chosen] if chosen in list(label_sets()) else _sets_of_models(cls)

        said = validity(lambda text: check_labels(text, sets), labels, "labels")

        added = graph.typed(cls, "add_label")
        if said is not True or not isinstance(added, str) or added == NONE:
            return said
        return validity(lambda name: check_labels(name, sets, "add_label"), added, "")  # the message names the input

    @classmethod
    @in_own_state
    def execute(cls, labels: Any = _LABELS, add_label: Any = NONE, **values: Any) -> io.NodeOutput:
        settings = settings_from(LabelSettings, values)
        text = expect_text(labels, "labels")
        if add_label != NONE:
            text = _with_menu_label(text, add_label, settings.label_set)

        count = len(split_labels(text)) * settings.images_per_label
        _check_count("labels", count)
        if settings.label_set == AUTO and count > 0:
            check_labels(text, _sets_of_models(cls))
            return io.NodeOutput(LabelText(text, settings.images_per_label))

        # Without any label it is refused here, by whichever set.
        label_set = next(iter(label_sets())) if settings.label_set == AUTO else settings.label_set
        return io.NodeOutput(resolve_labels(text, label_set, settings.images_per_label, field="labels"))


def _with_menu_label(text: str, choice: Any, label_set: str) -> str:
    """The labels with the one that was chosen in the menu ``add_label``."""
    sets = list(label_sets()) if label_set == AUTO else [label_set]
    check_labels(expect_text(choice, "add_label"), sets, "add_label")

    typed = text.strip()
    return f"{typed}\n{choice}" if typed else choice


ENCODER = "flan-t5-xl"
# T5 overflows in fp16.
ENCODER_DTYPES = (AUTO, *(name for name in DTYPES if name != "fp16"))
# Upper estimate of an encoder's activations.
_ENCODER_BYTES = 256 << 20
_encoder = ModelCache(host.devices.get_text_device, host.devices.get_text_offload_device)


@dataclass(frozen=True)
class PromptSettings(Settings):
    """Widgets of LlamaGen Prompt after text and encoder."""

    images: int = _images("Number of images to generate from the prompt")
    dtype: str = knob(
        AUTO,
        PRECISION,
        choices=ENCODER_DTYPES,
        advanced=True,
    )


_LAKE = "a red boat on a calm lake"


class TextPrompt(io.ComfyNode):
    more = {
        "text": (
            "FastAR changes the text to lower case, and removes web addresses, markup, file names, long numbers and "
            "most symbols. ComfyUI replaces `{red|blue}` with one of the two words for every run, as in CLIP Text "
            "Encode."
        ),
        "encoder": "The download of flan-t5-xl is 11 GB. Your own copy may be a Hugging Face folder or a single file.",
    }

    @classmethod
    def define_schema(cls) -> io.Schema:
        text = io.String.Input(
            "text",
            default=_LAKE,
            optional=True,
            multiline=True,
            dynamic_prompts=True,
            placeholder="what to draw, in plain words",
            tooltip="What to generate, in plain English, as one prompt. Usual: one or two sentences; text beyond "
            f"{MAX_TOKENS} tokens (about 90 words) is cut off.",
        )

        encoders = menu("t5")
        encoder = io.Combo.Input(
            "encoder",
            options=encoders,
            default=_usual_encoder(encoders),
            optional=True,
            tooltip="The text encoder; the official models need flan-t5-xl. Allow the download, or put the encoder "
            "into models/text_encoders or models/fastar.",
        )

        return schema(
            node_id="FastARLlamaGenPrompt",
            display_name="LlamaGen Prompt",
            category="FastAR/condition",
            description="Describes in words what LlamaGen's text-to-image models generate. The text encoder "
            "Flan-T5-XL, with which these models were trained, reads the text.",
            search_aliases=["text to image", "prompt", "t5", "flan-t5", "llamagen t2i", "clip text encode"],
            widgets=[text, encoder, allow_download(), *widgets(PromptSettings)],
            outputs=[
                output(TEXT, "condition", "The text. Connect it to a sampler for LlamaGen's text-to-image models.")
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, encoder: Any = None) -> bool | str:
        return validity(partial(listed, family="t5"), encoder, "encoder")

    @classmethod
    @in_own_state
    def execute(cls, text: Any = _LAKE, allow_download: Any = False, **values: Any) -> io.NodeOutput:
        encoder = values.pop("encoder", _usual_encoder(menu("t5")))
        settings = settings_from(PromptSettings, values)
        prompt = prompt_of(expect_text(text, "text"), "text")

        dtype = dtype_name(choose_dtype(settings.dtype, host.devices.get_text_device(), "t5"))
        find = finder(cls, allow_download)
        path = find(listed(encoder, "t5"), "t5")

        def load() -> Any:
            folder = path if path.is_dir() else path.parent
            core_tokenizer = None if has_tokenizer(folder, "", {}) else host.folders.t5_tokenizer()
            return load_text_encoder(path, dtype, host.devices.get_text_offload_device(), core_tokenizer)

        with enough_memory(READING):
            loaded = _encoder.get((path, dtype), load)
            load_to_device(loaded, _ENCODER_BYTES)
            features = loaded.model.encode([prompt])[0]

        # All images have the same prompt.
        rows = (host.devices.to_output(features),) * settings.images
        prompts = (prompt,) * settings.images
        return io.NodeOutput(TextCondition(rows, prompts))


def _usual_encoder(encoders: list[str]) -> str:
    """The encoder on a menu that the official models need, else the first one."""
    return next((choice for choice in encoders if ENCODER in choice), encoders[0])


_SUNSET = "a red boat at sunset"
_SUBJECTS = f"The demo knows ten subjects: {', '.join(PICTURE_BOOK[:-1])} and {PICTURE_BOOK[-1]}."
# What an empty field shows, in Apps too.
_PLACEHOLDER = f"what to draw; the demo knows {', '.join(PICTURE_BOOK)}, colours, small, large, left, right, at night"


@dataclass(frozen=True)
class PromptImages(Settings):
    """The widget of Tar Prompt that is neither text nor a setting of a sampler."""

    images: int = _images("Number of images to generate from the prompt")


@dataclass(frozen=True)
class PromptLines(PromptImages):
    """The widgets of Prompt that are not text."""

    images: int = _images("Number of images to generate from each prompt")
    lines: bool = knob(
        False,
        "Reads every line as a separate prompt, and generates the images of all prompts in one batch. When this is "
        "off, the whole text is one prompt.",
        advanced=True,
        more="When this is on, *images* is the number of images for each line, and FastAR skips empty lines.",
    )


class Prompt(io.ComfyNode):
    more = {
        "text": (
            "ComfyUI replaces `{red|blue}` with one of the two words for every run, as in CLIP Text Encode. The "
            "model reads `(red:1.2)`, `<lora:...>`, `embedding:...`, `__wildcard__` and BREAK as plain text. In their "
            "benchmarks, Harmon's authors end every prompt with a full stop."
        ),
        "negative": "If *cfg* is 1, the negative prompt has no effect.",
    }

    @classmethod
    def define_schema(cls) -> io.Schema:
        text = io.String.Input(
            "text",
            default=_SUNSET,
            optional=True,
            multiline=True,
            dynamic_prompts=True,
            placeholder=_PLACEHOLDER,
            tooltip=f"What to generate, in plain words; the text may be empty. {_SUBJECTS}",
        )
        negative = io.String.Input(
            "negative",
            default="",
            optional=True,
            multiline=True,
            dynamic_prompts=True,
            placeholder="what the image should not show; may be empty",
            tooltip="What the image should not show, for example the colour red, or night; guidance moves the image "
            "away from this text. Only Harmon, UniPic and NextStep read this text; usual: empty.",
        )
        condition = output(
            PROMPT,
            "condition",
            "The prompts. Connect them to a sampler for Harmon, UniPic, Janus, NextStep or a 14B model of BitDance.",
        )

        return schema(
            node_id="FastARPrompt",
            display_name="Prompt (FastAR)",
            category="FastAR/condition",
            description="Describes in words what Harmon, UniPic, Janus, BitDance or NextStep generates. The model "
            "that is connected to the sampler reads the prompt, so you can use one prompt for several models.",
            search_aliases=["text prompt", "harmon prompt", "unipic prompt", "janus prompt", "positive", "negative"],
            widgets=[text, widgets(PromptLines)[0], negative, *widgets(PromptLines)[1:]],
            outputs=[condition],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    @in_own_state
    def execute(cls, text: Any = _SUNSET, negative: Any = "", **values: Any) -> io.NodeOutput:
        settings = settings_from(PromptLines, values)

        typed = expect_text(text, "text")
        prompts = [typed]
        if settings.lines:
            prompts = [line for line in typed.splitlines() if line.strip()] or [""]
        _check_count("images", len(prompts) * settings.images)

        # ``images`` images of each prompt follow one another.
        texts: list[str] = []
        for prompt in prompts:
            texts += [prompt] * settings.images

        # The sampler's model reads the prompt: what it does not know is said here after the run, see running.reported.
        avoided = expect_text(negative, "negative")
        condition = PromptCondition(tuple(texts), avoided if avoided.strip() else UNCONDITIONAL)
        return io.NodeOutput(condition)


# Pixels per side of the images that Janus-4o reads and draws.
_JANUS_SIDE = 384


@dataclass(frozen=True)
class ImagePromptSettings(EditSettings):
    """Widgets of Image and Prompt after text."""

    images: int = _images("Number of variants of every image")


_CHANGE = "make it night"


class ImageAndPrompt(io.ComfyNode):
    more = {
        "image": "A square image keeps the most detail.",
    }
    more_of_outputs = {
        "condition": (
            "FastAR refuses this condition for models that were not trained to edit, such as Janus-Pro and "
            "NextStep-1.1. FastAR decides by a model's name whether the model was trained to edit. If FastAR cannot "
            "tell from the name, FastAR runs the model, and the sampler's report contains a warning."
        ),
    }

    @classmethod
    def define_schema(cls) -> io.Schema:
        image = io.Image.Input(
            "image",
            tooltip="One or more images of any size; the setting 'images' sets the number of results for each image. "
            "Janus-4o scales the image to fit into 384 x 384 pixels, and fills the rest of this square with grey. "
            "NextStep cuts out the square in the middle of the image, and scales it to 512 x 512 pixels.",
        )
        text = io.String.Input(
            "text",
            default=_CHANGE,
            optional=True,
            multiline=True,
            dynamic_prompts=True,
            placeholder="what to change, as an instruction: turn the apple into a ball",
            tooltip="What to change, as an instruction in plain words; the instruction is the same for all images.",
        )

        return schema(
            node_id="FastARImageAndPrompt",
            display_name="Image and Prompt",
            category="FastAR/condition",
            description="Changes an image according to a prompt, with Janus-4o or NextStep-1-Large-Edit. The model "
            "regenerates the whole image; connect a mask to the sampler to change only a part of it.",
            search_aliases=["edit image", "image to image", "instruct", "janus-4o", "kontext", "img2img"],
            sockets=[image],
            widgets=[text, *widgets(ImagePromptSettings)],
            outputs=[
                output(
                    IMAGE_PROMPT,
                    "condition",
                    "The images and the instruction. Connect them to LlamaGen "
                    "Sampler or ZipAR Sampler with Janus-4o, or to NextStep Sampler with NextStep-1-Large-Edit.",
                )
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    @in_own_state
    def execute(cls, image: Any, text: Any = _CHANGE, **values: Any) -> io.NodeOutput:
        settings = settings_from(ImagePromptSettings, values)
        typed = expect_text(text, "text")
        images = expect_image(image, "image")
        _check_count("images", len(images) * settings.images)

        # The same bytes reach the model, and the digests of reports.
        pixels: list[Tensor] = []
        for own in to_bytes(images):
            pixels += [torch.from_numpy(own)] * settings.images

        height, width = images.shape[1:3]
        said = []
        if height != width:
            left, top, right, bottom = box_of(width, height, _JANUS_SIDE)
            said = [
                f"The model reads the image as a square: with Janus-4o, the image fills {right - left} x "
                f"{bottom - top} of {_JANUS_SIDE} x {_JANUS_SIDE} pixels, and grey fills the rest; NextStep reads only "
                "the square in the middle of the image."
            ]
        condition = ImagePromptCondition((typed,) * len(pixels), tuple(pixels), settings.freedom)
        return io.NodeOutput(condition, ui=host.text.output(said))


_ta_tok = ModelCache(host.devices.get_compute_device, host.devices.get_offload_device)


def _load_ta_tok(path: Path, dtype: str) -> TATokModel:
    """Load a TA-Tok, for the compute device, on the device of networks that are not in use."""
    about = host.operations.suited(host.devices.get_compute_device())
    return load_ta_tok(path, dtype, host.devices.get_offload_device(), **about)


# Images per batch of TA-Tok's encoder; the codebook is projected once per batch.
_BATCH = 8


_CODES_SEED = "Controls the randomness of the codes. A different seed gives a different image of the same prompt."
_CODES_SEED_MORE = "The seed of the sampler only changes how the codes are turned into pixels."


class TarPrompt(io.ComfyNode):
    more = {
        "text": "ComfyUI replaces `{red|blue}` with one of the two words for every run, as in CLIP Text Encode.",
        "preset": RECOMMENDS,
        "images": "Each image gets its own codes.",
        "first_image": (
            "To generate only one image of the batch again, also set *images* of this node to 1. Then give "
            "*first_image* of the sampler the same value as *first_image* of this node."
        ),
    }

    @classmethod
    def define_schema(cls) -> io.Schema:
        text = io.String.Input(
            "text",
            default=_SUNSET,
            optional=True,
            multiline=True,
            dynamic_prompts=True,
            placeholder=_PLACEHOLDER,
            tooltip=f"What to generate, in plain words, usually in one or two sentences. {_SUBJECTS}",
        )

        return schema(
            node_id="FastARTarPrompt",
            display_name="Tar Prompt",
            category="FastAR/condition",
            description="Describes in words what Tar generates: the language model of Tar writes semantic codes, which "
            "describe the image. Several samplers can generate images from the same codes, each at its own size.",
            search_aliases=["text to image", "prompt", "tar", "semantic codes", "clip text encode"],
            sockets=[
                TAR.Input(
                    "tar",
                    tooltip="The language model, from Load Tar. This node does not work with LlamaGen: use LlamaGen "
                    "Prompt for LlamaGen's text-to-image models, and Class Label for LlamaGen's other models.",
                )
            ],
            widgets=[
                text,
                seed_widget(tooltip=_CODES_SEED, more=_CODES_SEED_MORE),
                preset_widget(PLAIN),
                *setting_widgets(TarPromptSettings, PLAIN),
                *widgets(PromptImages),
                first_image_widget(),
            ],
            outputs=[
                output(CODES, "condition", "The semantic codes. Connect them to a sampler for a Tar de-tokenizer.")
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
        )

    @classmethod
    @in_own_state
    def execute(
        cls,
        tar: Any,
        text: Any = _SUNSET,
        seed: Any = SEED,
        preset: Any = PLAIN[0],
        images: Any = 1,
        first_image: Any = 0,
        **values: Any,
    ) -> io.NodeOutput:
        loaded = expect_language_model(tar)
        model = loaded.model
        prompt = expect_text(text, "text").strip()
        number = checked_seed(seed)
        count = settings_from(PromptImages, {"images": images}).images
        first = checked_first_image(first_image)
        option = checked_preset(preset, PLAIN)
        settings, warning = settings_sent(TarPromptSettings, PLAIN, option, facts_of(loaded), values)

        load_to_device(loaded, estimate_prompt(model, settings, prompt, count))

        done: TarPrompted = drive(written_codes(model, [prompt] * count, settings, number, first))
        said = host.text.output([], [unknown_words(model, [prompt]), warning])
        return io.NodeOutput(done.condition, ui=said)


@dataclass(frozen=True)
class ImageToCodesSettings(Settings):
    """Widgets of Image to Codes after ta_tok."""

    detail: str = knob(
        DETAILS[0],
        "Number of semantic codes that describe the image; fewer codes keep less of the image. Usual: 729, the number "
        "that Tar's training used most.",
        choices=DETAILS,
        more="The usual TA-Tok gives 81, 169 or 729 codes. If your TA-Tok gives other numbers of codes, choose 729 for "
        "its largest number, 169 for the second largest, and 81 for the third largest.",
    )
    images: int = _images("Number of variants of every image")
    dtype: str = knob(
        AUTO,
        PRECISION,
        choices=(AUTO, *DTYPES),
        advanced=True,
    )


# The first of these that is on the menu is the default.
_READERS = ("demo-ta-tok", "ta-tok")


class ImageToCodes(io.ComfyNode):
    more = {
        "image": "With the official TA-Tok, the square has 384 x 384 pixels.",
        "ta_tok": (
            "The file of a de-tokenizer often contains only the part of the TA-Tok that reads codes, but this node "
            "needs the part that reads images. Put your own files into `models/fastar`."
        ),
    }

    @classmethod
    def define_schema(cls) -> io.Schema:
        image = io.Image.Input(
            "image",
            tooltip="Images of any size. FastAR stretches each image to a square.",
        )

        readers = menu("ta-tok")
        ta_tok = io.Combo.Input(
            "ta_tok",
            options=readers,
            default=usual(readers, *_READERS),
            optional=True,
            tooltip="The TA-Tok (Tar's image tokenizer) that reads the images; choose the TA-Tok with which the "
            "de-tokenizer was trained. Entries of the menu that show a size are downloads.",
        )

        return schema(
            node_id="FastARImageToCodes",
            display_name="Image to Codes",
            category="FastAR/condition",
            description="Reads the content of an image as Tar's semantic codes, from which a de-tokenizer generates "
            "new images. The new images show the same content, but they are not copies.",
            search_aliases=["ta-tok", "image to tokens", "semantic codes", "variation", "reconstruct", "vae encode"],
            sockets=[image],
            widgets=[ta_tok, allow_download(), *widgets(ImageToCodesSettings)],
            outputs=[
                output(CODES, "condition", "The semantic codes. Connect them to a sampler for a Tar de-tokenizer.")
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, ta_tok: Any = None) -> bool | str:
        return validity(partial(listed, family="ta-tok"), ta_tok, "ta_tok")

    @classmethod
    @in_own_state
    def execute(cls, image: Any, allow_download: Any = False, **values: Any) -> io.NodeOutput:
        # 1. Check the images.
        ta_tok = values.pop("ta_tok", usual(menu("ta-tok"), *_READERS))
        settings = settings_from(ImageToCodesSettings, values)
        images = expect_image(image, "image")
        _check_count("images", len(images) * settings.images)
        pixels = to_rgb(images).movedim(-1, 1).float().clamp(0, 1)

        # 2. Load the TA-Tok.
        dtype = dtype_name(choose_dtype(settings.dtype, host.devices.get_compute_device(), "ta-tok"))
        find = finder(cls, allow_download)
        path = find(listed(ta_tok, "ta-tok"), "ta-tok")
        with enough_memory(READING):
            loaded = _ta_tok.get((path, dtype), lambda: _load_ta_tok(path, dtype))
        model: TATokModel = loaded.model
        load_to_device(loaded, _ENCODER_BYTES)

        # 3. Read the images, batch by batch.
        scale = DETAILS.index(settings.detail) + 1
        found: list[Tensor] = []
        report = host.progress.callback()
        for first in range(0, len(pixels), _BATCH):
            report(first, len(pixels))
            batch = pixels[first : first + _BATCH]
            with enough_memory(READING):
                found.append(model.codes(batch, scale).cpu())
        report(len(pixels), len(pixels))

        # 4. ``images`` variants of each image follow one another.
        codes: list[Tensor] = []
        names: list[str] = []
        for i, own in enumerate(torch.cat(found)):
            codes += [own] * settings.images
            names += [f"image {i + 1}"] * settings.images

        return io.NodeOutput(CodeCondition(tuple(codes), tuple(names), model.net.config.codes))


NODES: list[type[io.ComfyNode]] = [ClassLabel, Prompt, ImageAndPrompt, TextPrompt, TarPrompt, ImageToCodes]
