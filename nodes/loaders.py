"""Loader nodes: a file to a model socket and a decoder on core's VAE socket."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from comfy_api.latest import io

from .. import assembly
from ..assembly import AUTO, Ready, Source
from ..errors import UserError
from ..memory import enough_memory
from ..model_loaders import hub
from ..model_loaders.checkpoint import DTYPES, INT8
from ..model_loaders.families import KINDS
from ..model_loaders.networks.autoencoder import KLAutoencoder, KLModel, VQModel
from ..model_loaders.networks.speed import KERNELS, PLAIN, SPEEDS
from ..samplers import registry
from . import host
from .fitting import KL, VQ
from .schema import MAR, TAR, TOKEN_MODEL, schema

# Model folders of each file family; the first takes downloads. Core's diffusion models are left out, because most of them are not MARs.
FOLDERS: dict[str, tuple[str, ...]] = {
    "kl": (host.FOLDER, "vae"),
    "vq": (host.FOLDER, "vae"),
    "t5": (host.FOLDER, "text_encoders"),
}
# Tokens per side on the menu; other sizes are stated in the file's metadata.
GRIDS = (8, 12, 16, 24, 32, 48, 64)
# Parts of a loaded token model, see ``host.Loaded``.
TA_TOK, UP_SAMPLER = "ta_tok", "up_sampler"


def _folders(family: str) -> tuple[str, ...]:
    return FOLDERS.get(family, (host.FOLDER,))


class Menu(list[str]):
    """Choices of a file family. As ComfyUI checks choices with ``in``, it also contains what the menu once showed: a download leaves
    the menu when it is complete, and saved graphs must stay valid. Core's check names the widget that is wrong and no other, which
    ``validate_inputs`` cannot do."""

    def __init__(self, choices: Iterable[str] = (), family: str = ""):
        super().__init__(choices)  # ComfyUI copies lists from their elements alone when it lists nodes
        self.family = family

    def __contains__(self, choice: object) -> bool:
        known = super().__contains__(choice)
        return known or bool(self.family) and isinstance(choice, str) and valid(self.family, choice) is True


def menu(family: str, *first: str) -> Menu:
    """Choices of a file family: ``first``, built-in entries, local files, downloads."""
    return Menu([*first, *hub.menu(family, host.local_files(*_folders(family)))], family)


def resolve(choice: Any, family: str) -> Path:
    """The file of a choice, downloaded if necessary.

    Raises:
        UserError: not a choice of the menu, or the download failed.
    """
    if not isinstance(choice, str):
        raise UserError(f"{KINDS[family].field}: {choice!r} is no file name; choose one from the list.")
    download_to = host.folders(host.FOLDER)[0]
    return hub.resolve(choice, family, host.folders(*_folders(family)), download_to, host.progress())


def usual(choices: list[str], *ids: str) -> str:
    """The first of these entries in a menu, downloaded or not; else the first choice."""
    return next((choice for name in ids for choice in choices if choice.partition(" (")[0] == name), choices[0])


def accepted(check: Callable[[], Any]) -> bool | str:
    """For ``validate_inputs``: True if ``check`` passes, else its message without the field's name, which ComfyUI puts in front.

    ComfyUI reports the message for every input that ``validate_inputs`` names: name one.
    """
    try:
        check()
    except UserError as problem:
        return str(problem).partition(": ")[2]
    return True


def valid(family: str, choice: Any) -> bool | str:
    """Check a file choice: True if it is or was on its menu, else a message, see :func:`accepted`.

    Values that arrive over a link are None here and are checked when the node runs.
    """
    if choice is None:
        return True
    return accepted(lambda: hub.check(str(choice), family, host.local_files(*_folders(family))))


def source_of(dtype: str, speed: str = PLAIN) -> Source:
    """Weights are placed on the offload device, in the dtype for the compute device.

    Raises:
        UserError: ``speed`` is not a choice of its menu.
    """
    if speed not in SPEEDS:
        raise UserError(f"speed: {speed!r} is none of {', '.join(SPEEDS)}; choose one of them.")
    return Source(resolve, host.offload_device(), dtype, host.device(), speed)


def speed_widget(diffusion_head: bool) -> io.Input:
    """How the model runs, with the choice "kernels" for a diffusion head."""
    kernels = " kernels: as compile, with Triton kernels for the diffusion head; CUDA only." if diffusion_head else ""
    captured = "the diffusion loop" if diffusion_head else "a decoding step"
    return _combo(
        "speed",
        [s for s in SPEEDS if diffusion_head or s != KERNELS],
        "How the model runs; the picture differs by rounding only. plain starts at once. compile: torch.compile, which takes a minute "
        f"before the first picture and needs a compiler.{kernels} graphs: CUDA graphs of {captured}, for few images at a time; CUDA only.",
        default=PLAIN,
        advanced=True,
    )


def _side(grid: Any) -> int | None:
    """Value of the grid widget; None for auto.

    Raises:
        UserError: not a choice of the menu.
    """
    side = None if grid == AUTO else next((n for n in GRIDS if str(n) == str(grid)), 0)
    if side == 0:
        raise UserError(f"grid: {grid!r} is none of {AUTO}, {', '.join(map(str, GRIDS))}; choose one of them.")
    return side


def make_vae(model: KLModel | VQModel, channels: int) -> host.FastARVAE:
    """An autoencoder, of ``channels`` latent channels, for core's VAE nodes."""
    about = (model.net, model.name, model.net.config.stride, channels, model.net.config.ch)
    return host.FastARVAE(*about, VQ) if isinstance(model, VQModel) else KLDecoder(*about, KL)


class KLDecoder(host.FastARVAE):
    """A KL autoencoder, which needs less memory than core's estimate."""

    def memory_used_decode(self, shape: Any, dtype: torch.dtype) -> float:
        net = cast(KLAutoencoder, self.first_stage_model)
        return net.decode_bytes(1, shape[2], shape[3])


def _output(ready: Ready, parts: dict[str, Any]) -> io.NodeOutput:
    """Outputs of a loader: the model with its decoder and parts (None: left out), and the decoder."""
    assert ready.decoder is not None
    vae = make_vae(ready.decoder, ready.latent_channels)
    loaded = {name: host.Loaded.of(part) for name, part in parts.items() if part is not None}
    return io.NodeOutput(host.Loaded.of(ready.model, vae, loaded, assembly.defaults(ready)), vae)


def _combo(name: str, options: list[str], tooltip: str, default: str = AUTO, **about: Any) -> io.Input:
    return io.Combo.Input(name, options=options, default=default, tooltip=tooltip, **about)


def _outputs(model: io.Output) -> list[io.Output]:
    return [model, io.Vae.Output("vae", display_name="vae", tooltip="For VAE Decode and VAE Encode.")]


class LoadMAR(io.ComfyNode):
    """A MAR and its decoder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="FastARLoadMAR",
            display_name="Load MAR",
            category="FastAR/load",
            description="Loads a MAR and the decoder that turns its latents into pictures. The demo is built in; official "
            "models are downloaded when the graph runs, once, into models/fastar.",
            search_aliases=["mar loader", "masked autoregressive", "load checkpoint", "fastar demo"],
            widgets=[
                _combo(
                    "checkpoint",
                    menu("mar"),
                    "demo is built in and needs no network. Your own files go into models/fastar (.safetensors, .pth). "
                    "Entries with a size are downloaded when the graph runs; larger models draw better and slower.",
                    default="demo",
                ),
                _combo(
                    "decoder",
                    menu("kl", AUTO),
                    "The autoencoder that turns latents into pictures. auto takes the one the checkpoint was trained "
                    "with; another of the same latents may sharpen or blur.",
                ),
                _combo(
                    "dtype",
                    [AUTO, *DTYPES, INT8],
                    "Precision of the MAR. auto: fp16 on a graphics card made for it, else fp32. fp32 is exact and "
                    "needs twice the memory; bf16 is coarser and may show. The diffusion arithmetic and the decoder are fp32.",
                ),
                speed_widget(diffusion_head=True),
            ],
            outputs=_outputs(
                MAR.Output("model", display_name="model", tooltip="For MAR Sampler and its accelerated relatives.")
            ),
        )

    @classmethod
    def validate_inputs(cls, checkpoint: Any = None) -> bool | str:
        return valid("mar", checkpoint)

    @classmethod
    def execute(cls, checkpoint: str, decoder: str, dtype: str, speed: str = PLAIN) -> io.NodeOutput:
        return _output(assembly.load(registry.MAR, checkpoint, source_of(dtype, speed), decoder), {})


class LoadLlamaGen(io.ComfyNode):
    """A LlamaGen or PAR and its decoder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        models = menu("llamagen")
        return schema(
            node_id="FastARLoadLlamaGen",
            display_name="Load LlamaGen / PAR",
            category="FastAR/load",
            description="Loads a LlamaGen (for classes or text) or a PAR, and the VQ tokenizer that turns its tokens into pictures. "
            "Official models are downloaded when the graph runs, once, into models/fastar.",
            search_aliases=[
                "llamagen loader",
                "par loader",
                "autoregressive",
                "vqgan",
                "load checkpoint",
                "fastar demo",
            ],
            widgets=[
                _combo(
                    "checkpoint",
                    models,
                    "Entries that begin with demo are built in and need no network. Your own files go into models/fastar "
                    "(.safetensors, .pt). Entries with a size are downloaded when the graph runs; larger models draw better and slower.",
                    default=models[0],
                ),
                _combo(
                    "decoder",
                    menu("vq", AUTO),
                    "The VQ tokenizer that turns tokens into pictures. auto takes the one the checkpoint was trained with; "
                    "another one's codes mean something else.",
                ),
                _combo(
                    "grid",
                    [AUTO, *map(str, GRIDS)],
                    "Tokens along one side of the picture. auto takes what the file or its name says. Only for files that say "
                    "nothing: 16 for 256 pixels, 24 for 384, 32 for 512. Another one than it was trained with draws nonsense.",
                ),
                _combo(
                    "dtype",
                    [AUTO, *DTYPES, INT8],
                    "Precision of the model. auto: bf16 on a graphics card that has it, which is what the models were made "
                    "with, else fp16 or fp32. fp32 is exact and takes twice the memory. The decoder is fp32 in any case.",
                ),
                speed_widget(diffusion_head=False),
            ],
            outputs=_outputs(
                TOKEN_MODEL.Output(
                    "model", display_name="model", tooltip="For LlamaGen, PAR, ZipAR and MuLo-SD Sampler."
                )
            ),
        )

    @classmethod
    def validate_inputs(cls, checkpoint: Any = None) -> bool | str:
        return valid("llamagen", checkpoint)

    @classmethod
    def execute(cls, checkpoint: str, decoder: str, grid: str, dtype: str, speed: str = PLAIN) -> io.NodeOutput:
        source = source_of(dtype, speed)
        ready = assembly.load(registry.LLAMAGEN, checkpoint, source, decoder, _side(grid))
        return _output(ready, {UP_SAMPLER: assembly.load_up_sampler(ready.decoder_choice, source)})


class LoadTar(io.ComfyNode):
    """Tar's language model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        models = menu("tar")
        return schema(
            node_id="FastARLoadTar",
            display_name="Load Tar",
            category="FastAR/load",
            description="Loads the language model of Tar, which turns a prompt into the semantic codes of a picture. A de-tokenizer of any "
            "size draws from those. Official models are downloaded when the graph runs, once, into models/fastar.",
            search_aliases=["tar loader", "text to image", "language model", "qwen", "load checkpoint"],
            widgets=[
                _combo(
                    "checkpoint",
                    models,
                    "Entries that begin with demo are built in and need no network. Your own go into models/fastar, as a folder "
                    "with config.json and tokenizer. Entries with a size are downloaded when the graph runs. 7b follows prompts better "
                    "than 1.5b, takes five times the memory and is slower.",
                    default=usual(models, "demo-tar", "tar-1.5b"),
                ),
                _combo(
                    "dtype",
                    [AUTO, *DTYPES, INT8],
                    "Precision of the model. auto: bf16 on a graphics card that has it, which is what it was made with, else fp16 "
                    "or fp32. fp32 is exact and takes twice the memory.",
                ),
            ],
            outputs=[TAR.Output("tar", display_name="tar", tooltip="For Tar Prompt.")],
        )

    @classmethod
    def validate_inputs(cls, checkpoint: Any = None) -> bool | str:
        return valid("tar", checkpoint)

    @classmethod
    def execute(cls, checkpoint: str, dtype: str) -> io.NodeOutput:
        with enough_memory(
            "dtype: memory is insufficient to load this model; choose bf16 or fp16, a smaller model, or unload others."
        ):
            model, stated = assembly.load_language_model(checkpoint, source_of(dtype))
        return io.NodeOutput(host.Loaded.of(model, recommended=stated))


class LoadTarDetokenizer(io.ComfyNode):
    """A de-tokenizer of Tar, with the TA-Tok and the decoder that belong to it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        models = menu("dtok")
        return schema(
            node_id="FastARLoadTarDetokenizer",
            display_name="Load Tar De-tokenizer",
            category="FastAR/load",
            description="Loads what draws a picture of Tar's semantic codes: an AR-DTok of one size, the TA-Tok that tells it what the "
            "codes mean, and the VQ tokenizer that turns its tokens into pictures. Fits every Tar language model.",
            search_aliases=["ar-dtok", "detokenizer", "tar decoder", "ta-tok", "vqgan", "load checkpoint"],
            widgets=[
                _combo(
                    "checkpoint",
                    models,
                    "The number is the side of the picture in pixels; larger is sharper and slower: 256, 1024 and 4096 tokens. "
                    "Entries that begin with demo are built in. Your own files go into models/fastar (.pth, .safetensors).",
                    default=usual(models, "demo-dtok", "demo-dtok-low", "ar-dtok-512"),
                ),
                _combo(
                    "ta_tok",
                    menu("ta-tok", AUTO),
                    "What turns semantic codes into the features it draws from. auto takes the one it was trained with; another "
                    "one's codes mean something else. It takes memory only while the codes are read.",
                ),
                _combo(
                    "decoder",
                    menu("vq", AUTO),
                    "The VQ tokenizer that turns tokens into pictures. auto takes the one the checkpoint was trained with; "
                    "another one's codes mean something else.",
                ),
                _combo(
                    "dtype",
                    [AUTO, *DTYPES, INT8],
                    "Precision of the de-tokenizer and of TA-Tok. auto: bf16 on a graphics card that has it, which is what they "
                    "were made with, else fp16 or fp32. fp32 is exact and takes twice the memory. The decoder is fp32 in any case.",
                ),
                _combo(
                    "grid",
                    [AUTO, *map(str, GRIDS)],
                    "Tokens along one side of the picture. auto takes what the file or its name says. Only for files that say "
                    "nothing: 16 for 256 pixels, 32 for 512, 64 for 1024. Another one than it was trained with draws nonsense.",
                    advanced=True,
                ),
                speed_widget(diffusion_head=False),
            ],
            outputs=_outputs(
                TOKEN_MODEL.Output("model", display_name="model", tooltip="For LlamaGen, ZipAR and MuLo-SD Sampler.")
            ),
        )

    @classmethod
    def validate_inputs(cls, checkpoint: Any = None) -> bool | str:
        return valid("dtok", checkpoint)

    @classmethod
    def execute(
        cls, checkpoint: str, ta_tok: str, decoder: str, dtype: str, grid: str = AUTO, speed: str = PLAIN
    ) -> io.NodeOutput:
        source = source_of(dtype, speed)
        ready = assembly.load(registry.TAR, checkpoint, source, decoder, _side(grid))
        reader = assembly.load_reader(ready, source, ta_tok)
        ready = replace(ready, model=replace(ready.model, ta_tok=reader))
        return _output(ready, {TA_TOK: reader, UP_SAMPLER: assembly.load_up_sampler(ready.decoder_choice, source)})


NODES: list[type[io.ComfyNode]] = [LoadMAR, LoadLlamaGen, LoadTar, LoadTarDetokenizer]
