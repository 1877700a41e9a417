"""Condition nodes: class labels, prompts, and the semantic codes of pictures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from comfy_api.latest import io

from ..assembly import AUTO, dtype_name, prompt_settings
from ..errors import UserError
from ..memory import enough_memory
from ..model_loaders import hub
from ..model_loaders.captions import clean
from ..model_loaders.families import DTYPES, choose_dtype
from ..model_loaders.networks.hybrid import UNCONDITIONAL
from ..model_loaders.networks.llama import TokenModel
from ..model_loaders.networks.ta_tok import TATokModel
from ..model_loaders.networks.tar import TarModel
from ..model_loaders.tar import load_ta_tok
from ..model_loaders.text import MAX_TOKENS, load_text_encoder
from ..model_loaders.tokenizer import has_tokenizer
from ..samplers import registry
from ..samplers.batches import in_parts
from ..samplers.conditioning import (
    PICTURE_BOOK,
    CodeCondition,
    Condition,
    PromptCondition,
    TextCondition,
    check_labels,
    expect_kind,
    label_sets,
    resolve_labels,
    split_labels,
)
from ..samplers.settings import Settings, knob, make
from ..samplers.tokens.draws import PairedDraws
from ..samplers.tokens.settings import DETAILS, TarPromptSettings
from ..samplers.tokens.tar import TarPrompted, tar_prompt
from . import host
from .loaders import allow_download, finder, listed, menu, usual
from .schema import (
    CODES,
    LABEL,
    PLAIN,
    PROMPT,
    TAR,
    TEXT,
    checked_seed,
    chosen,
    expect,
    expect_image,
    expect_model,
    expect_text,
    output,
    preset_widget,
    schema,
    seed_widget,
    validity,
    widgets,
)

MOST_IMAGES = 256
# If memory is insufficient to encode texts, pictures or codes.
READING = (
    "dtype: memory is insufficient for this model; choose bf16 or fp16 where it is offered, or unload other models."
)
NONE = "none"
# Label sets of catalogued models, by whether they are built in.
_SETS = {True: "picture-book", False: "imagenet-1k"}


def _images(what: str) -> Any:
    """The setting of the number of images; ``what`` begins its tooltip."""
    more = "more makes the batch larger, which costs time and memory but less than separate runs. Usual: 1 to 4."
    return knob(1, f"{what}; {more}", low=1, high=MOST_IMAGES, step=1)


def _check_count(field: str, images: int) -> None:
    if images > MOST_IMAGES:
        raise UserError(f"{field}: {images} images are asked for; {MOST_IMAGES} at once are the most.")


@dataclass(frozen=True)
class LabelSettings(Settings):
    """Widgets of Class Label that are not text."""

    label_set: str = knob(
        AUTO,
        "Which names are meant. auto: those of the model that the condition is connected to. picture-book: the demo; "
        "imagenet-1k: the official models.",
        choices=(AUTO, *label_sets()),
    )
    images_per_label: int = _images("Pictures of every label")


@lru_cache(maxsize=1)
def _found() -> dict[str, tuple[str, str]]:
    """Menu text to (label, label set)."""
    return {f"{name} ({where})": (name, where) for where, names in label_sets().items() for name in names}


@dataclass(frozen=True)
class LabelText:
    """Labels, ``repeat`` images of each, whose label set is the one of the model that samples them."""

    text: str
    repeat: int


def _sets_for(node: Any) -> list[str]:
    """Label sets from which a Class Label can take names: of the models that sample it, all sets where these are not known."""
    graph, number = host.graph_of(node), str(host.hidden(node, "unique_id"))
    built_in = {e.id: e.built_in for family in (registry.MAR, registry.LLAMAGEN) for e in hub.entries(family)}
    found: set[str] = set()
    try:
        if graph[number]["inputs"]["label_set"] in label_sets():
            return [graph[number]["inputs"]["label_set"]]
        for inputs in (user["inputs"] for user in graph.values()):
            if inputs.get("condition") == [number, 0]:
                loader, _ = inputs["model"] if "model" in inputs else inputs["target"]
                found.add(_SETS[built_in[graph[loader]["inputs"]["checkpoint"].partition(" (")[0]]])
    except (AttributeError, KeyError, TypeError, ValueError):
        found.clear()  # a file that is not in the catalogue, or a graph that cannot run
    return sorted(found) or list(label_sets())


def as_labels(value: Any, label_set: str) -> Condition:
    """The class labels on a condition socket, for a model of that label set."""
    if isinstance(value, LabelText):
        return resolve_labels(value.text, label_set, value.repeat, field="condition")
    return expect(value, Condition, "condition", "Class Label")


class ClassLabel(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="FastARClassLabel",
            display_name="Class Label",
            category="FastAR/condition",
            description="What to draw, by class name or id: one label an image. Several labels make a batch. For MAR, LlamaGen and PAR.",
            search_aliases=["class conditioning", "imagenet class", "label", "category", "prompt"],
            widgets=[
                io.String.Input(
                    "labels",
                    default="cat",
                    multiline=True,
                    placeholder="names or ids, separated by commas or lines",
                    tooltip="Class names or ids, separated by commas or lines; each is one image of the batch, so more labels "
                    f"make more pictures. The demo knows {', '.join(PICTURE_BOOK)}. Usual: cat, or 281 for imagenet-1k's tabby.",
                ),
                *widgets(LabelSettings),
                io.Combo.Input(
                    "add_label",
                    options=[NONE, *_found()],
                    default=NONE,
                    tooltip="One more label, found by name: open the list and type a part of it. It comes after those in labels "
                    "(which may then be empty) and must be of the same label_set.",
                ),
            ],
            outputs=[output(LABEL, "condition", "For the samplers of MAR, LlamaGen and PAR models.")],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
        )

    @classmethod
    def validate_inputs(cls, labels: Any = None) -> bool | str:
        """Names that the connected models do not know."""
        return validity(lambda text: check_labels(text, _sets_for(cls)), labels, "labels")

    @classmethod
    def execute(cls, labels: Any, add_label: Any = NONE, **values: Any) -> io.NodeOutput:
        settings = make(LabelSettings, values)
        text = expect_text(labels, "labels")
        if add_label != NONE:
            if not isinstance(add_label, str) or add_label not in _found():
                raise UserError(f"add_label: {add_label!r} is not in the list; choose one from it.")
            name, where = _found()[add_label]
            if settings.label_set not in (where, AUTO):
                raise UserError(
                    f"add_label: {name} is a label of {where}; set label_set to {where}, or add_label to {NONE}."
                )
            text = "\n".join(filter(None, (text.strip(), name)))
        count = len(split_labels(text)) * settings.images_per_label
        _check_count("labels", count)
        if settings.label_set == AUTO and count:
            check_labels(text, _sets_for(cls))
            return io.NodeOutput(LabelText(text, settings.images_per_label))
        set_ = next(iter(label_sets())) if settings.label_set == AUTO else settings.label_set
        return io.NodeOutput(resolve_labels(text, set_, settings.images_per_label, field="labels"))


ENCODER = "flan-t5-xl"
# T5 overflows in fp16.
ENCODER_DTYPES = (AUTO, *(name for name in DTYPES if name != "fp16"))
# Upper estimate of an encoder's activations.
_ENCODER_BYTES = 256 << 20
_encoder = host.ModelCache(host.text_device, host.text_offload_device)


@dataclass(frozen=True)
class PromptSettings(Settings):
    """Widgets of Text Prompt after text and encoder."""

    images: int = _images("Pictures of the text")
    dtype: str = knob(
        AUTO,
        "Precision of the text encoder. auto: bf16 on a graphics card that has it, else fp32. fp32 is exact and takes twice the "
        "memory; bf16 is what the official models were trained with.",
        choices=ENCODER_DTYPES,
        advanced=True,
    )


class TextPrompt(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        encoders = menu("t5")
        return schema(
            node_id="FastARTextPrompt",
            display_name="Text Prompt (LlamaGen)",
            category="FastAR/condition",
            description="What to draw, in words, for LlamaGen's text-to-image models. The text goes through the Flan-T5-XL encoder, "
            "cleaned as the models' training captions were.",
            search_aliases=["text to image", "prompt", "t5", "flan-t5", "llamagen t2i", "clip text encode"],
            widgets=[
                io.String.Input(
                    "text",
                    default="a red boat on a calm lake",
                    multiline=True,
                    placeholder="what to draw, in plain words",
                    tooltip="One prompt, in plain English; lines are joined. A longer text says more, up to "
                    f"{MAX_TOKENS} tokens (about 90 words): what stands beyond is cut off. Usual: one or two sentences.",
                ),
                io.Combo.Input(
                    "encoder",
                    options=encoders,
                    default=next((choice for choice in encoders if ENCODER in choice), encoders[0]),
                    tooltip="The text encoder. The official models need flan-t5-xl; allow its download, or put "
                    "it into models/text_encoders or models/fastar, as a folder or one file. Another size does not fit.",
                ),
                allow_download(),
                *widgets(PromptSettings),
            ],
            outputs=[output(TEXT, "condition", "For LlamaGen, PAR, ZipAR and MuLo-SD Sampler.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, text: Any, encoder: Any, allow_download: Any, **values: Any) -> io.NodeOutput:
        settings = make(PromptSettings, values)
        prompt = " ".join(expect_text(text, "text").split())
        if not clean(prompt):  # as captions are cleaned
            only = (
                "addresses, file names and signs are left out, and nothing else is there" if prompt else "it is empty"
            )
            raise UserError(f"text: {only}; say in words what to draw.")
        name = dtype_name(choose_dtype(settings.dtype, host.text_device(), "t5"))
        path = finder(cls, allow_download)(listed(encoder, "t5"), "t5")

        def load() -> Any:
            folder = path if path.is_dir() else path.parent
            own = None if has_tokenizer(folder, "", {}) else host.t5_tokenizer()
            return load_text_encoder(path, name, host.text_offload_device(), own)

        with enough_memory(READING):
            loaded = _encoder.get((path, name), load)
            host.load_to_device(loaded, _ENCODER_BYTES)
            features = loaded.model.encode([prompt])[0]
        return io.NodeOutput(TextCondition((host.to_output(features),) * settings.images, (prompt,) * settings.images))


_SUBJECTS = f"The demo draws {', '.join(PICTURE_BOOK)}."


def unknown_words(model: Any, texts: Sequence[str]) -> str:
    """A sentence that names the words of prompts that a model with a vocabulary of words does not know; "" for other models."""
    unknown = model.tokenize("qzx") if texts and hasattr(model, "tokenize") else []
    if len(unknown) != 1 or unknown != model.tokenize("xqz"):
        return ""
    words = dict.fromkeys(
        word for text in texts for word in re.findall(r"\w+", text) if model.tokenize(word) == unknown
    )
    return f"Words that {model.name} does not know: {', '.join(words)}." if words else ""


@dataclass(frozen=True)
class PromptImages(Settings):
    """The widget of Prompt and Tar Prompt that is neither text nor a setting of a sampler."""

    images: int = _images("Pictures of the prompt")


@dataclass(frozen=True)
class PromptLines(PromptImages):
    """The widgets of Prompt that are not text."""

    lines: bool = knob(
        False,
        "On: every line is a prompt of its own, and one batch draws them all; empty lines are left out. Off: the text is one prompt.",
        advanced=True,
    )


class Prompt(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="FastARPrompt",
            display_name="Prompt (FastAR)",
            category="FastAR/condition",
            description="What to draw, in words, for Harmon, UniPic and Janus. The model that samples reads the prompt itself.",
            search_aliases=["text prompt", "harmon prompt", "unipic prompt", "janus prompt", "positive", "negative"],
            widgets=[
                io.String.Input(
                    "text",
                    default="a red boat at sunset",
                    multiline=True,
                    placeholder="what to draw",
                    tooltip="The prompt, read as typed; it may be empty. The authors' benchmark prompts ended with a full stop. "
                    f"{_SUBJECTS}",
                ),
                io.String.Input(
                    "negative",
                    default=UNCONDITIONAL,
                    multiline=True,
                    advanced=True,
                    tooltip="What guidance leads away from, in Harmon and UniPic: a whole instruction, not a list of words. "
                    f"Usual, and what the models were trained with: {UNCONDITIONAL} Janus ignores it.",
                ),
                *widgets(PromptLines),
            ],
            outputs=[
                output(
                    PROMPT,
                    "condition",
                    "For the MAR samplers with Harmon or UniPic, and LlamaGen and ZipAR Sampler with Janus.",
                )
            ],
        )

    @classmethod
    def execute(cls, text: Any, negative: Any = UNCONDITIONAL, **values: Any) -> io.NodeOutput:
        settings = make(PromptLines, values)
        prompts = [expect_text(text, "text")]
        if settings.lines:
            prompts = [line for line in prompts[0].splitlines() if line.strip()] or [""]
        _check_count("images", len(prompts) * settings.images)
        texts = tuple(prompt for prompt in prompts for _ in range(settings.images))
        return io.NodeOutput(PromptCondition(texts, expect_text(negative, "negative")))


_ta_tok = host.ModelCache(host.device, host.offload_device)
# Pictures per batch of TA-Tok's encoder; the codebook is projected once per batch.
_BATCH = 8


def _prompt_bytes(tar: TarModel, settings: TarPromptSettings, text: str, images: int) -> float:
    """Upper estimate of working memory: KV cache, rows of the prompt, and logits."""
    scale, c = DETAILS.index(settings.detail), tar.net.config
    rows, size = len(tar.prompt(text, scale)), next(tar.net.parameters()).element_size()
    cache = 2.0 * c.depth * c.kv_heads * c.head_dim * (rows + tar.sides[scale] ** 2) * images * size
    return cache + max(rows, images) * (8 * c.dim + 3 * c.hidden) * size + 4.0 * tar.special.codes * images * 10


class TarPrompt(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        detail, *others, parallel = widgets(TarPromptSettings)
        return schema(
            node_id="FastARTarPrompt",
            display_name="Tar Prompt",
            category="FastAR/condition",
            description="What to draw, in words, for Tar. Its language model writes the semantic codes of the picture; de-tokenizers of "
            "all sizes and all methods can draw from one run.",
            search_aliases=["text to image", "prompt", "tar", "semantic codes", "clip text encode"],
            sockets=[TAR.Input("tar", tooltip="The language model, from Load Tar.")],
            widgets=[
                io.String.Input(
                    "text",
                    default="a red boat at sunset",
                    multiline=True,
                    placeholder="what to draw",
                    tooltip="One prompt. A longer one says more, as far as the model has room. Whatever is typed is read as text; an empty "
                    f"one makes an unconditional image. Usual: one or two sentences. {_SUBJECTS}",
                ),
                seed_widget(),
                detail,
                preset_widget(others, PLAIN),
                parallel,
                *widgets(PromptImages),
            ],
            outputs=[output(CODES, "condition", "For LlamaGen, ZipAR and MuLo-SD Sampler.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls, tar: Any, text: Any, seed: Any, preset: Any = None, images: Any = 1, **values: Any
    ) -> io.NodeOutput:
        loaded = expect_model(tar, host.Loaded, TarModel, "tar", "Load Tar")
        typed = expect_text(text, "text").strip()
        number, count = checked_seed(seed), make(PromptImages, {"images": images}).images
        _, asked = chosen(preset, PLAIN)
        settings = prompt_settings(loaded.recommended, {**asked, **values})
        host.show(cls, [unknown_words(loaded.model, [typed])])
        host.load_to_device(loaded, _prompt_bytes(loaded.model, settings, typed, count))

        def start(part: range) -> Any:
            return tar_prompt(loaded.model, [typed] * len(part), settings, PairedDraws(number, part), number)

        done: TarPrompted = host.drive(in_parts(start, count))
        return io.NodeOutput(done.condition)


@dataclass(frozen=True)
class ImageToCodesSettings(Settings):
    """Widgets of Image to Codes after ta_tok."""

    detail: str = knob(
        DETAILS[0],
        "How many semantic codes tell what the picture shows; fewer keeps less of it. Usual: 729, on which Tar was trained "
        "most. A TA-Tok with another grid writes its own three numbers in their place.",
        choices=DETAILS,
        symbol="scale",
    )
    images: int = _images("Variants of each picture")
    dtype: str = knob(
        AUTO,
        "Precision of TA-Tok. auto: bf16 on a graphics card that has it, which is what it was made with, else fp16 or fp32. fp32 is "
        "exact and takes twice the memory.",
        choices=(AUTO, *DTYPES),
        advanced=True,
    )


class ImageToCodes(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        readers = menu("ta-tok")
        return schema(
            node_id="FastARImageToCodes",
            display_name="Image to Codes",
            category="FastAR/condition",
            description="What a picture shows, as Tar's semantic codes: a de-tokenizer redraws the same content. The codes hold "
            "the content, not the pixels.",
            search_aliases=["ta-tok", "image to tokens", "semantic codes", "variation", "reconstruct", "vae encode"],
            sockets=[
                io.Image.Input(
                    "image",
                    tooltip="Pictures of any size; each is stretched to a square. One entry of the condition each.",
                )
            ],
            widgets=[
                io.Combo.Input(
                    "ta_tok",
                    options=readers,
                    default=usual(readers, "demo-ta-tok", "ta-tok"),
                    tooltip="The TA-Tok that reads the pictures: the one that the de-tokenizer was trained with. Entries with a size "
                    "are downloads.",
                ),
                allow_download(),
                *widgets(ImageToCodesSettings),
            ],
            outputs=[output(CODES, "condition", "For LlamaGen, ZipAR and MuLo-SD Sampler.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, image: Any, ta_tok: Any, allow_download: Any, **values: Any) -> io.NodeOutput:
        settings = make(ImageToCodesSettings, values)
        pictures = expect_image(image, "image")
        _check_count("images", len(pictures) * settings.images)
        x = pictures.expand(*pictures.shape[:3], 3) if pictures.shape[3] == 1 else pictures[..., :3]
        x = x.movedim(-1, 1).float().nan_to_num(0.0).clamp(0, 1)
        name = dtype_name(choose_dtype(settings.dtype, host.device(), "ta-tok"))
        path = finder(cls, allow_download)(listed(ta_tok, "ta-tok"), "ta-tok")
        with enough_memory(READING):
            loaded = _ta_tok.get((path, name), lambda: load_ta_tok(path, name, host.offload_device()))
        model: TATokModel = loaded.model
        host.load_to_device(loaded, _ENCODER_BYTES)
        found, report = [], host.progress()
        for at in range(0, len(x), _BATCH):
            report(at, len(x))
            with enough_memory(READING):
                found.append(model.codes(x[at : at + _BATCH], DETAILS.index(settings.detail) + 1).cpu())
        report(len(x), len(x))
        each = [(codes, f"picture {i + 1}") for i, codes in enumerate(torch.cat(found)) for _ in range(settings.images)]
        return io.NodeOutput(
            CodeCondition(tuple(codes for codes, _ in each), tuple(title for _, title in each), model.net.config.codes)
        )


# Nodes that read large files to what they make.
_SLOW: dict[str, Any] = {
    "FastARTextPrompt": TextCondition,
    "FastARTarPrompt": CodeCondition,
    "FastARImageToCodes": CodeCondition,
}


class ModelFirst(io.ComfyNode):
    """A node whose model is loaded before its condition is made: one that does not fit is refused before its files are downloaded."""

    @classmethod
    def check_lazy_status(cls, condition: Any = None, **inputs: Any) -> list[str]:
        made = _SLOW.get(host.maker(cls, "condition"))
        model = getattr(inputs.get("model", inputs.get("target")), "model", None)
        if made and isinstance(model, TokenModel) and (made.kind, model.net.config.condition) != ("codes", "features"):
            expect_kind(made, model.net.config.condition, model.name)
        return ["condition"]


NODES: list[type[io.ComfyNode]] = [ClassLabel, Prompt, TextPrompt, TarPrompt, ImageToCodes]
