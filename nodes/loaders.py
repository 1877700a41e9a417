"""Loader nodes: from a file to a model socket and a decoder on ComfyUI's VAE socket."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

from comfy_api.v0_0_2 import io

from ..errors import UserError
from ..memory import enough_memory
from ..model_loaders.autoencoders.latent_samplers import load_latent_samplers
from ..model_loaders.catalogue import hub
from ..model_loaders.files import checkpoint
from ..model_loaders.files.wrappers import WEIGHTS
from ..model_loaders.kinds import KINDS, dtypes_of
from ..networks.autoencoder import KLModel, VQModel
from ..networks.bitdance import BlockModel
from ..networks.speed import COMPILE, SPEEDS
from ..networks.torch_state import in_own_state
from ..runs import loading, registry
from ..runs.families import Family
from ..runs.loading import AUTO, Source
from ..runs.registry import family_of
from . import host
from .host.loaded import TA_TOK, Loaded
from .schema import BLOCK_MODEL, LATENT_SAMPLERS, MAR, TAR, TOKEN_MODEL, checked_switch, output, schema
from .vae import BITS, VQ, FastARVAE

# Model folders of each file family; the first takes downloads.
# ComfyUI's diffusion models are left out, because most of them are not MARs.
FOLDERS: dict[str, tuple[str, ...]] = {
    "kl": (host.folders.FOLDER, "vae"),
    "vq": (host.folders.FOLDER, "vae"),
    "bitdance-ae": (host.folders.FOLDER, "vae"),
    "t5": (host.folders.FOLDER, "text_encoders"),
}
# Tokens per side on the menu; other sizes are stated in the file's metadata.
GRIDS = (8, 12, 16, 24, 32, 48, 64)
# Pixels per side of Harmon and UniPic on the menu, and pixels per token of the official models.
SIZES = (256, 320, 384, 448, 512, 576, 640, 704, 768, 832, 896, 960, 1024)
PIXELS = 16

# Files in ComfyUI's formats of 8 bits are ComfyUI's to read.
checkpoint.gather_quantised = host.operations.gather_quantised


def menu(family: str, *first: str) -> list[str]:
    """Choices of a file family: ``first``, built-in entries, local files, downloads."""
    kinds = folders_of(family)
    found = hub.menu(family, host.folders.local_files(*kinds))

    return [*first, *found]


def folders_of(family: str) -> tuple[str, ...]:
    """Model folders of a file family."""
    return FOLDERS.get(family, (host.folders.FOLDER,))


def listed(choice: Any, family: str, *first: str) -> str:
    """Check that a choice is one of ``first``, or stands for an entry or a file, see :mod:`hub`.

    Menus show one spelling of each, and graphs travel between machines and versions.
    """
    if choice not in first:
        kinds = folders_of(family)
        hub.check(choice, family, host.folders.paths(*kinds), host.folders.local_files(*kinds))

    return str(choice)


def finder(node: Any, allow_download: Any) -> Callable[[str, str], Path]:
    """A function (choice, family) to the file of a choice, downloaded if necessary and allowed.

    ``node`` shows what is downloaded.
    """
    allowed = checked_switch(allow_download, "allow_download")

    def find(choice: str, family: str) -> Path:
        folders = host.folders.paths(*folders_of(family))
        download_to = host.folders.paths(host.folders.FOLDER)[0]

        entry = hub.absent(choice, family, [*folders, download_to])
        if entry is not None:
            # If nobody states the size of a file, a note may say the least size.
            unknown = entry.note if "GB" in entry.note else "size unknown"
            size = hub.readable_size(entry.size) if entry.size else unknown
            download = (
                f"{entry.id} ({size}) from the Hugging Face repository {entry.repo} into models/{host.folders.FOLDER}"
            )
            if not allowed:
                raise UserError(
                    f"{KINDS[family].field}: the run would download {download}; switch on allow_download (an advanced "
                    "input), or choose a file that is on this computer."
                )

            logging.info("FastAR: downloading %s", download)
            host.text.show(node, f"Downloading {download}")

        return hub.resolve(choice, family, folders, download_to, host.progress.callback())

    return find


def allow_download() -> io.Input:
    """The switch that allows large downloads."""
    return io.Boolean.Input(
        "allow_download",
        default=False,
        advanced=True,
        optional=True,
        tooltip="Download missing files once, into models/fastar, when the workflow runs. When this is off and a file "
        "is missing, the run stops with an error that states the source of the download, and the size if it is known.",
    )


def usual(choices: list[str], *ids: str) -> str:
    """The first of these entries in a menu, downloaded or not; else the first choice, "" where there is none."""
    for name in ids:
        for choice in choices:
            listed_name, _, _ = choice.partition(" (")
            if listed_name == name:
                return choice

    return choices[0] if choices else ""


# Tooltips of networks without weights of 8 bits.
PRECISION = (
    "Precision of the weights; auto uses bf16 on GPUs that support bf16, otherwise fp32. fp32 is the most exact and "
    "takes twice as much memory as bf16."
)

# Of tooltips on menus of files. The label of a download states its size only if the catalogue knows the size.
_DOWNLOADS = 'Menu entries with the word "download" are not on your computer yet.'

# Tooltips of the widgets that several loaders have; a loader's own replace them.
_TOOLTIPS = {
    "checkpoint": "The model; a larger model gives better images and is slower. Demo models are built in, and your own "
    f"files go into models/fastar. {_DOWNLOADS}",
    "decoder": "The VQ tokenizer that turns tokens into images. Usual: auto, which loads the tokenizer that the model "
    "was trained with; a different tokenizer gives wrong images.",
    "ta_tok": "The TA-Tok that turns the semantic codes into features for AR-DTok. Usual: auto, which loads the "
    "TA-Tok with which AR-DTok was trained; a different TA-Tok gives wrong images.",
    "dtype": "Precision of the weights; auto uses bf16 on GPUs that support bf16, otherwise fp32. fp32 is the most "
    "exact and takes twice as much memory as bf16; int8 and fp8 take about 55 to 70 % of the memory of bf16, are "
    "usually slower, and change the image.",
    "grid": "Number of tokens along one side of the image. Usual: auto, which reads the number from the file. If you "
    "choose the number yourself, choose 16 for 256 pixels, 24 for 384, 32 for 512, and 64 for 1024; a wrong number "
    "gives noise.",
    "size": "Side of the image in pixels. Usual: auto, the size of the training images (512 for Harmon, 1024 for "
    "UniPic); images of other sizes usually look worse.",
    "weights": "A training checkpoint may hold every weight twice: not averaged, and as an average over the training "
    "(EMA). Usual: auto, which reads the averages if the file holds them. ema always reads the averages, and trained "
    "always reads the weights that are not averaged; if the file does not hold the weights that you choose, the run "
    "stops with an error.",
    "speed": "How operations are launched. plain launches every operation separately. Usual: auto, which on an NVIDIA "
    "GPU launches many operations at once (CUDA graphs); this is faster and gives the same image. On other devices, "
    "auto does the same as plain. compile does what auto does and also uses torch.compile; it needs a compiler and "
    "about a minute before the first image, and changes the image by rounding errors.",
}

# The end of tooltips on dtypes, for families with 4-bit dtypes.
_ALL_BITS = (
    "fp32 takes twice as much memory as bf16; int8 and fp8 take about 55 to 70 % of the memory of bf16, int4 takes "
    "less, and int4-g64 takes least. Weights in 8 bits change the image, weights in 4 bits change it more, and both "
    "are usually slower than bf16."
)
_AUTO_BF16 = f"Precision of the weights; auto uses bf16 on GPUs that support bf16, otherwise fp32. {_ALL_BITS}"

# Speeds of graphs that were saved earlier, and what they are now.
_OLD_SPEEDS = {"compile-static": COMPILE}
# Menus among the advanced widgets.
_ADVANCED = ("grid", "size", "speed", "weights")


def _one_of(field: str, value: Any, options: Sequence[str]) -> str:
    """Check a choice of a menu without files."""
    if str(value) not in options:
        raise UserError(f"{field}: {value!r} is not one of {', '.join(options)}.")

    return str(value)


def tokens_per_side(grid: str, size: str) -> int | None:
    """The number of tokens along one side that the widgets ``grid`` and ``size`` choose; None if both are auto."""
    if size != AUTO:
        return int(size) // PIXELS
    if grid != AUTO:
        return int(grid)
    return None


def make_vae(decoder: KLModel | VQModel, model: Any) -> FastARVAE:
    """The autoencoder of a model for ComfyUI's VAE nodes."""
    config: Any = decoder.net.config
    family = family_of(model)
    kind = family.decoder
    sizes = family.sizes(model, config.stride)

    return FastARVAE(
        decoder.net,
        decoder.name,
        stride=config.stride,
        enlarges=config.enlarges,
        channels=config.code_channels if kind == VQ else config.z_channels,
        width=config.widths[0] if kind == BITS else config.ch,
        sizes=sizes,
        kind=kind,
    )


class _Loader(io.ComfyNode):
    """Loads a model and its decoder. The classes below hold texts and menus."""

    node_id: ClassVar[str]
    title: ClassVar[str]
    description: ClassVar[str]
    aliases: ClassVar[list[str]]
    family: ClassVar[str]  # of the registry
    usual: ClassVar[tuple[str, ...]]  # the first of these entries that is on the menu is the default
    widgets: ClassVar[tuple[str, ...]] = ("checkpoint", "decoder", "dtype", "allow_download", "speed", "weights")
    tooltips: ClassVar[dict[str, str]] = {}  # where they differ from other loaders' texts
    socket: ClassVar[io.Output]  # of the model
    decodes: ClassVar[bool] = True  # whether it also loads a decoder

    @classmethod
    def files(cls) -> dict[str, tuple[str, ...]]:
        """Widgets that are menus of files, with the arguments of :func:`menu`."""
        family = registry.FAMILIES[cls.family]

        return {"checkpoint": (family.files,), "decoder": (family.decoder, AUTO), "ta_tok": ("ta-tok", AUTO)}

    @classmethod
    def options(cls, widget: str) -> list[str]:
        """Choices of a widget."""
        files = cls.files()
        if widget in files:
            return menu(*files[widget])

        menus: dict[str, list[str]] = {
            "dtype": list(dtypes_of(KINDS[files["checkpoint"][0]])),
            "grid": [AUTO, *map(str, GRIDS)],
            "size": [AUTO, *map(str, SIZES)],
            "speed": list(SPEEDS),
            "weights": list(WEIGHTS),
        }
        return menus[widget]

    @classmethod
    def define_schema(cls) -> io.Schema:
        widgets: list[io.Input] = []
        for name in cls.widgets:
            widgets.append(allow_download() if name == "allow_download" else cls._menu_widget(name))

        outputs = [cls.socket]
        if cls.decodes:
            outputs.append(output(io.Vae, "vae", "The decoder. Connect it to VAE Decode and VAE Encode."))

        return schema(
            node_id=cls.node_id,
            display_name=cls.title,
            category="FastAR/load",
            description=cls.description,
            search_aliases=cls.aliases,
            widgets=widgets,
            outputs=outputs,
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def _menu_widget(cls, name: str) -> io.Input:
        """The widget of that name, a menu."""
        options = cls.options(name)
        if name == "checkpoint":
            default = usual(options, *cls.usual)
        else:
            default = AUTO

        tooltips = {**_TOOLTIPS, **cls.tooltips}
        return io.Combo.Input(
            name,
            options=options,
            default=default,
            tooltip=tooltips[name],
            advanced=True if name in _ADVANCED else None,
            optional=name != "checkpoint",
        )

    @classmethod
    def validate_inputs(
        cls, checkpoint: Any = None, decoder: Any = None, ta_tok: Any = None, speed: Any = None
    ) -> bool | str:
        """Naming an input here replaces ComfyUI's comparison with the menu, which shows one spelling of each file, and
        not the speeds of older graphs.
        """
        chosen = {"checkpoint": checkpoint, "decoder": decoder, "ta_tok": ta_tok}

        try:
            for widget, about in cls.files().items():
                if chosen[widget] is not None:  # None: a value that is connected, and is checked when the node runs
                    listed(chosen[widget], *about)
            if speed is not None:
                _one_of("speed", _OLD_SPEEDS.get(str(speed), speed), SPEEDS)
        except UserError as problem:
            return str(problem)
        return True

    @classmethod
    @in_own_state
    def execute(
        cls,
        checkpoint: Any,
        decoder: Any = AUTO,
        dtype: Any = AUTO,
        allow_download: Any = False,
        speed: Any = AUTO,
        ta_tok: Any = AUTO,
        grid: Any = AUTO,
        size: Any = AUTO,
        weights: Any = AUTO,
    ) -> io.NodeOutput:
        # 1. Check all choices.
        chosen = {"checkpoint": checkpoint, "decoder": decoder, "ta_tok": ta_tok}
        for widget, about in cls.files().items():
            listed(chosen[widget], *about)

        speed = _OLD_SPEEDS.get(str(speed), speed)
        menus = {"dtype": dtype, "speed": speed, "grid": grid, "size": size, "weights": weights}
        for widget, value in menus.items():
            menus[widget] = _one_of(widget, value, cls.options(widget))

        # 2. Load the model and its decoder on the offload device, in the dtype for the compute device.
        source = Source(
            finder(cls, allow_download),
            device=host.devices.get_offload_device(),
            dtype=menus["dtype"],
            compute=host.devices.get_compute_device(),
            speed=menus["speed"],
            about=host.operations.suited(host.devices.get_compute_device()),
        )
        side = tokens_per_side(menus["grid"], menus["size"])
        ready = loading.load(cls.family, checkpoint, source, decoder, side, menus["weights"])
        decoder_model = ready.decoder
        assert decoder_model is not None

        parts: dict[str, Loaded[Any]] = {}
        if "ta_tok" in cls.widgets:
            reader = loading.load_reader(ready, source, ta_tok)
            parts[TA_TOK] = Loaded.of(reader)
            ready = replace(ready, model=replace(cast(Any, ready.model), ta_tok=reader))

        # 3. The decoder as ComfyUI's VAE, and the model under ComfyUI's memory management.
        vae = make_vae(decoder_model, ready.model)
        if menus["size"] != AUTO and vae.downscale_ratio * cast(Any, ready.model).patch != PIXELS:
            raise UserError(
                f"size: the sizes in this menu are for models whose tokens cover {PIXELS} x {PIXELS} pixels, but "
                f"{ready.model.name} has tokens of a different size; choose {AUTO}."
            )

        loaded = Loaded.of(ready.model, vae, parts, loading.defaults(ready), menus["speed"])
        return io.NodeOutput(loaded, vae, ui=cls.said(ready.model))

    @classmethod
    def said(cls, model: Any) -> dict[str, list[Any]] | None:
        """What the node says about a loaded model."""
        return None


# The end of a text on dtypes: of families without, and of families with 4-bit dtypes.
_EIGHT_BITS = "*int8* changes the image less than *fp8* does; see docs/precision.md in the repository."
_FOUR_BITS = (
    "*int8* changes the image less than *fp8*, *int4* and *int4-g64* do; see docs/precision.md in the repository."
)
_KL = (
    "The autoencoder that turns latents into images. Usual: auto, which loads the autoencoder that the model was "
    "trained with."
)
_TILES = (
    "If an image is larger than *tile_size*, VAE Decode (Tiled) stops with an error for the demo's decoder; for all "
    "other decoders, VAE Decode (Tiled) changes colours and contrast, and shows a warning."
)
_MAR_OUTPUT = output(MAR, "model", "The model. Connect it to MAR Sampler, or to a sampler that accelerates MAR.")


class LoadMAR(_Loader):
    node_id = "FastARLoadMAR"
    title = "Load MAR"
    family = registry.MAR
    usual = ("demo",)
    description = (
        "Loads a MAR model and the decoder that turns its latents into images. The demo model is built in; official "
        "models can be downloaded."
    )
    aliases = ["autoregressive", "mar loader", "masked autoregressive", "load checkpoint", "fastar demo"]
    tooltips = {
        "decoder": _KL,
        "dtype": "Precision of the weights; auto uses fp16 on GPUs with fast fp16, otherwise fp32. fp32 is the most "
        "exact and takes twice as much memory as fp16; int8 and fp8 take about 55 to 70 % of the memory of fp16, are "
        "usually slower, and change the image.",
    }
    socket = _MAR_OUTPUT
    more = {
        "checkpoint": (
            "*demo* and the smaller model *demo-draft* generate simple scenes of ten classes. Your own files may be "
            "`.safetensors` files or the official `.pth` files. Press *R* in the editor to refresh the list."
        ),
        "decoder": "If you choose a different autoencoder, it must decode the same kind of latents.",
        "dtype": f"In MAR, *bf16* is less precise than *fp16*, and the difference may be visible. {_EIGHT_BITS}",
        "weights": "The official `checkpoint-last.pth` holds both kinds of weights.",
    }
    more_of_outputs = {
        "vae": (
            "You can also connect *vae* to VAE Encode (for Inpainting) and VAESave. VAE Encode scales any image to "
            "the size of the images that the model generates."
        ),
    }


class LoadHybrid(_Loader):
    node_id = "FastARLoadHarmon"
    title = "Load Harmon / UniPic"
    family = registry.HYBRID
    usual = ("demo-hybrid", "harmon-0.5b")
    description = (
        "Loads Harmon or UniPic, a MAR with a language model inside, which generates images from a prompt with "
        "MAR's samplers. The official weights may not be used commercially."
    )
    aliases = ["harmon", "unipic", "skywork", "text to image", "hybrid loader", "load checkpoint"]
    widgets = ("checkpoint", "decoder", "dtype", "allow_download", "size", "speed")
    tooltips = {
        "checkpoint": "The model. Demo models are built in. Your own files go into models/fastar, together with a "
        f"Qwen2.5 tokenizer. {_DOWNLOADS} The official models are for non-commercial use.",
        "decoder": _KL,
    }
    socket = _MAR_OUTPUT
    more = {
        "checkpoint": (
            "Your own model may be a Hugging Face folder, a single `.safetensors` file, or the authors' `.pth` or "
            "`.bin` file. FastAR reads the tokenizer from the folder of the model: either `tokenizer.json`, or "
            "`vocab.json` and `merges.txt`. If there is no tokenizer, FastAR downloads one. Press *R* in the editor to "
            "refresh the list."
        ),
        "decoder": "For the official models, *auto* loads the autoencoder KL-16 of MAR.",
        "dtype": _EIGHT_BITS,
    }
    more_of_outputs = {
        "vae": (
            "Decoding an image of 1024 x 1024 pixels takes 2.7 GB of GPU memory. If memory is short, unload other "
            f"models, or use VAE Decode (Tiled), which takes less memory. {_TILES}"
        ),
    }


class LoadLlamaGen(_Loader):
    node_id = "FastARLoadLlamaGen"
    title = "Load LlamaGen / PAR"
    family = registry.LLAMAGEN
    usual = ("demo-llamagen",)
    description = (
        "Loads a LlamaGen model (for class labels or text) or a PAR model, and the VQ tokenizer that turns its tokens "
        "into images. The demo model is built in; official models can be downloaded."
    )
    aliases = ["llamagen loader", "par loader", "autoregressive", "vqgan", "load checkpoint", "fastar demo"]
    widgets = ("checkpoint", "decoder", "dtype", "allow_download", "grid", "speed")
    tooltips = {
        "dtype": "Precision of the weights; auto uses bf16 on GPUs that support bf16, otherwise fp16 on GPUs with "
        f"fast fp16, or else fp32. {_ALL_BITS}"
    }
    socket = output(
        TOKEN_MODEL,
        "model",
        "The model. Connect it to LlamaGen Sampler, or to a sampler that accelerates "
        "LlamaGen; a PAR model fits only PAR Sampler.",
    )
    more = {
        "checkpoint": (
            "Your own files may be `.safetensors` files or the official `.pt` files. Press *R* in the editor to "
            "refresh "
            "the list.\n  - *llamagen-...*: models that generate images of ImageNet's classes. The number at the end "
            "of the name is the side of the image in pixels.\n  - *llamagen-t2i-...*: models that generate images "
            "from a text prompt; connect LlamaGen Prompt.\n  - *par-...*: models that were trained to decide 4 or "
            "16 tokens per pass. Only PAR Sampler can run them."
        ),
        "decoder": "FastAR refuses a tokenizer whose number of codes differs from the model's number of codes.",
        "grid": (
            "If the file does not state the number, *auto* computes it from the image size in the file's name (256 in "
            "*c2i_B_256.pt*)."
        ),
        "dtype": _FOUR_BITS,
    }
    more_of_outputs = {
        "vae": _TILES,
    }


class LoadTarDetokenizer(_Loader):
    node_id = "FastARLoadTarDetokenizer"
    title = "Load Tar De-tokenizer"
    family = registry.TAR
    usual = ("demo-dtok", "demo-dtok-low", "ar-dtok-512")
    description = (
        "Loads the models that turn Tar's semantic codes into an image: the de-tokenizer (AR-DTok), TA-Tok and the VQ "
        "tokenizer. They fit every Tar language model."
    )
    aliases = ["ar-dtok", "detokenizer", "tar decoder", "ta-tok", "vqgan", "load checkpoint"]
    widgets = ("checkpoint", "ta_tok", "decoder", "dtype", "allow_download", "grid", "speed")
    tooltips = {
        "checkpoint": "The AR-DTok (the file of the de-tokenizer). The number in the name of an official AR-DTok is "
        "the side of the image in pixels; a larger image is sharper and slower. Demo models are built in, and your own "
        f"files go into models/fastar. {_DOWNLOADS}",
        "dtype": _AUTO_BF16,
    }
    socket = output(
        TOKEN_MODEL, "model", "The de-tokenizer. Connect it to LlamaGen Sampler, ZipAR Sampler or MuLo-SD Sampler."
    )
    more = {
        "checkpoint": (
            "An image has 256 tokens at a side of 256 pixels, 1024 tokens at 512 pixels, and 4096 tokens at 1024 "
            "pixels. Your own files may be `.safetensors` files or the official `.pth` files."
        ),
        "ta_tok": "FastAR refuses a TA-Tok whose features do not have the width that AR-DTok reads.",
        "decoder": "FastAR refuses a decoder whose number of codes differs from AR-DTok's.",
        "grid": "FastAR refuses a number that is too large for the file.",
        "dtype": f"The setting applies to AR-DTok and TA-Tok, but not to the decoder. {_FOUR_BITS}",
    }
    more_of_outputs = {
        "vae": _TILES,
    }


class LoadTar(_Loader):
    node_id = "FastARLoadTar"
    title = "Load Tar"
    family = registry.TAR
    usual = ("demo-tar", "tar-1.5b")
    description = (
        "Loads the language model of Tar, which turns a prompt into the semantic codes of an image. The demo model is "
        "built in; official models can be downloaded."
    )
    aliases = ["tar loader", "text to image", "language model", "qwen", "load checkpoint"]
    widgets = ("checkpoint", "dtype", "allow_download")
    tooltips = {
        "checkpoint": "The model. tar-7b follows prompts better than tar-1.5b, but tar-7b is slower and takes five "
        "times as much memory. Demo models are built in. Your own model goes into models/fastar, as a folder with "
        f"config.json and a tokenizer. {_DOWNLOADS}",
        "dtype": _AUTO_BF16,
    }
    socket = output(TAR, "tar", "The language model. Connect it to Tar Prompt.")
    decodes = False

    more = {
        "checkpoint": "Press *R* in the editor to refresh the list.",
        "dtype": _FOUR_BITS,
    }

    @classmethod
    def files(cls) -> dict[str, tuple[str, ...]]:
        return {"checkpoint": ("tar",)}

    @classmethod
    @in_own_state
    def execute(  # type: ignore[override]
        cls, checkpoint: Any, dtype: Any = AUTO, allow_download: Any = False
    ) -> io.NodeOutput:
        source = Source(
            finder(cls, allow_download),
            device=host.devices.get_offload_device(),
            dtype=dtype,
            compute=host.devices.get_compute_device(),
            about=host.operations.suited(host.devices.get_compute_device()),
        )

        with enough_memory(
            "dtype: there is not enough memory to load this model; choose the dtype int8, bf16 or fp16, or a smaller "
            "model, or unload other models."
        ):
            model, stated = loading.load_language_model(listed(checkpoint, "tar"), source)

        return io.NodeOutput(Loaded.of(model, recommended=stated))


class LoadLatentSamplers(_Loader):
    node_id = "FastARLoadLatentSamplers"
    title = "Load Latent Samplers"
    family = registry.LLAMAGEN
    usual = ()
    description = (
        "Loads the two trained networks with which MuLo-SD enlarges a draft and reduces the result again, without "
        "decoding tokens to pixels. A file fits only one VQ tokenizer, and only one ratio between the side of the "
        "large image and the side of the small image."
    )
    aliases = ["mulo-sd", "up-sampler", "down-sampler", "upscale draft", "latent upscale"]
    widgets = ("checkpoint",)
    tooltips = {
        "checkpoint": "The file with the latent up-sampler and the latent down-sampler; put your own files into "
        "models/fastar. The section Notes of the help page says how to train such a file.",
    }
    socket = output(
        LATENT_SAMPLERS,
        "latent_samplers",
        "The two networks. Connect them to the input latent_samplers of MuLo-SD Sampler.",
    )
    decodes = False

    more = {"checkpoint": "Press *R* in the editor to refresh the list."}

    @classmethod
    def files(cls) -> dict[str, tuple[str, ...]]:
        return {"checkpoint": ("latent-samplers",)}

    @classmethod
    @in_own_state
    def execute(cls, checkpoint: Any) -> io.NodeOutput:  # type: ignore[override]
        find = finder(cls, False)
        path = find(listed(checkpoint, "latent-samplers"), "latent-samplers")
        about = host.operations.suited(host.devices.get_compute_device())
        return io.NodeOutput(Loaded.of(load_latent_samplers(path, host.devices.get_offload_device(), **about)))


class LoadJanus(_Loader):
    node_id = "FastARLoadJanus"
    title = "Load Janus"
    family = registry.JANUS
    usual = ("janus-pro-1b",)
    description = (
        "Loads a Janus-Pro model (1B or 7B), which generates images of 384 pixels from a prompt. The VQ tokenizer "
        "that turns its tokens into images is in the same file."
    )
    aliases = ["janus pro", "deepseek", "text to image", "autoregressive prompt model", "load checkpoint"]
    widgets = ("checkpoint", "dtype", "allow_download", "speed")
    tooltips = {
        "checkpoint": f"The model. {_DOWNLOADS} To use your own model, put its folder, with tokenizer.json, into "
        "models/fastar. In bf16, generating an image takes 3.6 GB of GPU memory with a 1B model, and 14.2 GB with a 7B "
        "model. On a smaller GPU, a part of the model stays in system memory, and the run is slower.",
        "dtype": _AUTO_BF16,
    }
    socket = output(
        TOKEN_MODEL,
        "model",
        "The model. Connect it to LlamaGen Sampler or ZipAR Sampler. Connect the node Prompt (FastAR) to condition of "
        "the sampler; with Janus-4o, you can connect the node Image and Prompt instead.",
    )

    more = {
        "checkpoint": (
            "FastAR supports Janus 1.3B, Janus-Pro-1B and Janus-Pro-7B, and two fine-tunes, Janus-4o-7B and "
            "Janus-Pro-R1-7B. A model folder may have the layout of deepseek-ai or of the package *transformers*. The "
            'weights may be `.safetensors` or the official `.bin`. If the name of the folder contains "1.3b", FastAR '
            "uses the prompt template of Janus 1.3B, which differs from the template of Janus-Pro."
        ),
        "dtype": _FOUR_BITS,
    }
    more_of_outputs = {
        "model": "You can also connect *model* to the nodes Advisor, Any Sampler, Sweep and Ask about Image.",
        "vae": "If an image is larger than *tile_size*, VAE Decode (Tiled) changes colours and contrast, and shows a "
        "warning.",
    }

    @classmethod
    @in_own_state
    def execute(  # type: ignore[override]
        cls, checkpoint: Any, dtype: Any = AUTO, allow_download: Any = False, speed: Any = AUTO
    ) -> io.NodeOutput:
        return super().execute(checkpoint, AUTO, dtype, allow_download, speed)


class LoadBitDance(_Loader):
    node_id = "FastARLoadBitDance"
    title = "Load BitDance"
    family = registry.BITDANCE
    usual = ("demo-bitdance", "bitdance-b-4x")
    description = (
        "Loads a BitDance model, which generates an image block by block: an ImageNet model (B, L, H) for class "
        "labels, or a 14B model for prompts, in sizes around 1024 pixels. After a run, the node lists the sizes of "
        "the model."
    )
    aliases = ["bitdance loader", "binary tokens", "text to image", "autoregressive", "load checkpoint"]
    tooltips = {
        "checkpoint": "The model. Your own files go into models/fastar; a 14B model is a folder with all its parts. "
        f"{_DOWNLOADS} A 14B model needs about 21 GB of GPU memory in 8 bits, and 34 GB in bf16.",
        "decoder": "The binary autoencoder that turns bits into images. Usual: auto, which loads the autoencoder from "
        "the model's file or folder; if there is none, auto loads the official autoencoder.",
        "dtype": _AUTO_BF16,
    }
    socket = output(BLOCK_MODEL, "model", "The model. Connect it to BitDance Sampler.")

    more = {
        "checkpoint": (
            "Your own ImageNet model is a `.pt` or `.safetensors` file. The folder of a 14B model has the authors' "
            "layout or the layout of the package *diffusers*."
        ),
        "decoder": (
            "FastAR refuses an autoencoder whose number of bits or pixels per token differs from the model's number."
        ),
        "dtype": (
            f"{_FOUR_BITS} If the weights in the file are already int8 or scaled fp8, *auto* keeps them; any other "
            "choice converts them."
        ),
    }
    more_of_outputs = {
        "model": "You can also connect it to Any Sampler, Sweep and Advisor.",
        "vae": (
            "If the size of your image is one of the model's sizes, VAE Encode keeps the size; otherwise, VAE Encode "
            "scales the image to the model's size with the most similar aspect ratio. **VAE Decode (Tiled) stops with "
            "an error.**"
        ),
    }

    @classmethod
    def said(cls, model: BlockModel) -> dict[str, list[Any]] | None:
        """The sizes, width first as on the sampler; nothing of an ImageNet model, which has one."""
        if len(model.sizes) == 1:
            return None
        sizes = [f"{width} x {height}" for height, width in model.sizes or (model.usual_size,)]
        return host.text.output([f"This model generates images of {', '.join(sizes)} pixels."])


class LoadNextStep(_Loader):
    node_id = "FastARLoadNextStep"
    title = "Load NextStep"
    family = "nextstep"
    usual = ("nextstep-1.1",)
    description = (
        "Loads a NextStep-1 or NextStep-1.1 model (14B) and its autoencoder. The model generates images of up to 512 x "
        "512 pixels from a prompt, or edits an image; after a run, the node lists the sizes of the model."
    )
    aliases = ["nextstep loader", "stepfun", "continuous tokens", "text to image", "image edit", "load checkpoint"]
    tooltips = {
        "checkpoint": "The model. Your own model goes into models/fastar, as a folder with config.json and a "
        f"tokenizer. {_DOWNLOADS} A model needs about 29 GB of GPU memory in bf16, and 16 GB in 8 bits.",
        "decoder": "The autoencoder that turns latents into images. Usual: auto, which loads the autoencoder that "
        "belongs to the model; a different autoencoder gives wrong images.",
        "dtype": _AUTO_BF16,
    }
    socket = output(io.Custom("FASTAR_NEXTSTEP"), "model", "The model. Connect it to NextStep Sampler.")
    more = {
        "checkpoint": (
            "The folder has the authors' layout: `config.json`, the weight files, the tokenizer, and a folder `vae` "
            "with the autoencoder (`checkpoint.pt` and its own `config.json`). FastAR never runs the code in a model's "
            "folder."
        ),
        "decoder": (
            "*auto* loads the autoencoder from the folder `vae` in the model's folder. The folder of NextStep-1 has no "
            "folder `vae`. For NextStep-1, *auto* downloads the autoencoder *nextstep-f8ch16*, unless the folder "
            "`NextStep-1-f8ch16-Tokenizer` is beside the model's folder. FastAR refuses an autoencoder whose stride "
            "(pixels per latent position) or number of channels does not fit the model."
        ),
        "dtype": f"{_FOUR_BITS} We have not measured how much 4 bits change the images of NextStep.",
    }
    more_of_outputs = {
        "model": "You can also connect it to Any Sampler, Sweep and Advisor.",
        "vae": (
            "If the size of your image is one of the model's sizes, VAE Encode keeps the size; otherwise, VAE Encode "
            "scales the image to the model's size with the most similar aspect ratio. If an image is larger than "
            "*tile_size*, VAE Decode (Tiled) changes colours and contrast, and shows a warning."
        ),
    }

    @classmethod
    def said(cls, model: Any) -> dict[str, list[Any]] | None:
        """The sizes that it was trained for, width first as on the sampler."""
        sizes = [f"{width} x {height}" for height, width in model.sizes]
        return host.text.output([f"Trained for {', '.join(sizes)} pixels."])


def _node_of(family: Family) -> type[_Loader]:
    """The loader of a family that has no class here, with the texts of its record."""
    kind = KINDS[family.files]
    samplers = [entry.title for entry in registry.SAMPLERS.values() if family.name in entry.families]
    about = {
        "node_id": f"FastAR{''.join(kind.loader.split())}",
        "title": kind.loader,
        "family": family.name,
        "usual": family.demo,
        "description": f"Loads {family.words} and the decoder that turns what it draws into images.",
        "aliases": [family.name, "load checkpoint"],
        "widgets": _Loader.widgets if family.one_grid else (*_Loader.widgets, "grid"),
        "tooltips": {"decoder": _KL, **({} if kind.blocks else {"dtype": PRECISION})},
        "socket": output(io.Custom(family.socket), "model", f"For {' and '.join(samplers)} Sampler."),
    }
    return type("".join(kind.loader.split()), (_Loader,), about)


# Families with a class above.
_OWN = {loader.family for loader in _Loader.__subclasses__()}
NODES: list[type[io.ComfyNode]] = [
    LoadMAR,
    LoadLlamaGen,
    LoadTar,
    LoadTarDetokenizer,
    LoadHybrid,
    LoadLatentSamplers,
    LoadJanus,
    LoadBitDance,
    LoadNextStep,
    *(_node_of(family) for family in registry.FAMILIES.values() if family.name not in _OWN),
]
