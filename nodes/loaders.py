"""Loaders: a file becomes a model on our socket and a decoder on core's VAE socket."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from comfy_api.latest import io

from ..errors import UserError
from ..model_loaders import hub
from ..model_loaders.autoencoders import expect_codes, load_kl, load_vq
from ..model_loaders.checkpoint import DTYPES, choose_dtype
from ..model_loaders.llamagen import load_llamagen
from ..model_loaders.mar import load_mar
from ..model_loaders.networks.kl import KLModel
from ..model_loaders.networks.vq import VQModel
from ..model_loaders.tar import expect_features, load_detokenizer, load_ta_tok, load_tar, parts_inside
from ..model_loaders.upsampler import load_upsampler
from . import host
from .schema import MAR, TAR, TOKEN_MODEL, schema

AUTO = "auto"
# Where a person may have put the files. A decoder may also lie among core's; core's diffusion models are left out, so
# that the menu is not full of files that are no MAR.
MAR_FOLDERS = LLAMAGEN_FOLDERS = TAR_FOLDERS = (host.FOLDER,)
KL_FOLDERS = VQ_FOLDERS = (host.FOLDER, "vae")
# Tokens along one side that a person may have to name; other ones stand in a file's metadata.
GRIDS = (8, 12, 16, 24, 32, 48, 64)
# Parts of a loaded token model, see ``host.Loaded``.
TA_TOK, UP_SAMPLER = "ta_tok", "up_sampler"


def _menu(family: str, kinds: tuple[str, ...]) -> list[str]:
    return hub.menu(family, host.local_files(*kinds))


def _resolve(choice: str, family: str, kinds: tuple[str, ...]) -> Any:
    if not isinstance(choice, str):
        raise UserError(f"{hub.FIELDS[family]}: {choice!r} is no file name; choose one from the list.")
    return hub.resolve(choice, family, host.folders(*kinds), host.folders(host.FOLDER)[0], host.progress())


def usual(menu: list[str], *ids: str) -> str:
    """The first of these entries that a menu has, downloaded or not; else what stands first."""
    return next((choice for name in ids for choice in menu if choice.partition(" (")[0] == name), menu[0])


def _name(dtype: torch.dtype) -> str:
    """Its name: networks wait on the offload device, but in the precision of the device they will compute on."""
    return next(name for name, kind in DTYPES.items() if kind == dtype)


def _side(grid: Any) -> int | None:
    """What the grid widget says.

    Raises:
        UserError: nothing on its list.
    """
    side = None if grid == AUTO else next((n for n in GRIDS if str(n) == str(grid)), 0)
    if side == 0:
        raise UserError(f"grid: {grid!r} is none of {AUTO}, {', '.join(map(str, GRIDS))}; choose one of them.")
    return side


def _up_sampler(decoder: str) -> dict[str, host.Loaded]:
    """The latent up-sampler that was trained with a decoder, as a part; nothing if there is none."""
    found = hub.up_sampler_for(decoder)
    if found is None:
        return {}
    return {
        UP_SAMPLER: host.Loaded.of(
            load_upsampler(_resolve(found, "upsampler", (host.FOLDER,)), AUTO, host.offload_device())
        )
    }


def make_vae(model: KLModel | VQModel) -> host.FastARVAE:
    """An autoencoder for core's VAE nodes."""
    c = model.net.config
    return host.FastARVAE(
        model.net, model.name, c.stride, c.code_channels if isinstance(model, VQModel) else c.z_channels, c.ch
    )


def _valid(choices: list[tuple[Any, str, tuple[str, ...]]]) -> bool | str:
    """Whether (choice, family, folders) all are, or ever were, on their menus.

    Naming an input in ``validate_inputs`` switches core's menu check off for it: a download leaves the menu once it is here,
    and saved graphs must go on working. Values that come over a link are None here and checked when the node runs.
    """
    try:
        for choice, family, kinds in choices:
            if choice not in (None, AUTO):
                hub.check(str(choice), family, host.local_files(*kinds))
    except UserError as problem:
        return str(problem)
    return True


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
            inputs=[
                io.Combo.Input(
                    "checkpoint",
                    options=_menu("mar", MAR_FOLDERS),
                    default="demo",
                    tooltip="demo is built in and needs no network. Your own files go into models/fastar (.safetensors, .pth). "
                    "Entries with a size are downloaded when the graph runs; larger models draw better and slower.",
                ),
                io.Combo.Input(
                    "decoder",
                    options=[AUTO, *_menu("kl", KL_FOLDERS)],
                    default=AUTO,
                    tooltip="The autoencoder that turns latents into pictures. auto takes the one the checkpoint was trained "
                    "with; another of the same latents may sharpen or blur.",
                ),
                io.Combo.Input(
                    "dtype",
                    options=[AUTO, *DTYPES],
                    default=AUTO,
                    tooltip="Precision of the MAR. auto: fp16 on a graphics card made for it, else fp32. fp32 is exact and "
                    "needs twice the memory; bf16 is coarser and may show. The diffusion arithmetic and the decoder are fp32.",
                ),
            ],
            outputs=[
                MAR.Output("model", display_name="model", tooltip="For MAR Sampler and its accelerated relatives."),
                io.Vae.Output("vae", display_name="vae", tooltip="For VAE Decode and VAE Encode."),
            ],
        )

    @classmethod
    def validate_inputs(cls, checkpoint: Any = None, decoder: Any = None) -> bool | str:
        return _valid([(checkpoint, "mar", MAR_FOLDERS), (decoder, "kl", KL_FOLDERS)])

    @classmethod
    def execute(cls, checkpoint: str, decoder: str, dtype: str) -> io.NodeOutput:
        computes = choose_dtype(dtype, host.device())
        path = _resolve(checkpoint, "mar", MAR_FOLDERS)
        chosen = hub.decoder_for(checkpoint, path) if decoder == AUTO else decoder
        model = load_mar(path, _name(computes), host.offload_device())
        vae = make_vae(load_kl(_resolve(chosen, "kl", KL_FOLDERS), AUTO, host.offload_device()))
        makes = model.net.config.channels // model.patch**2
        if makes != vae.latent_channels:
            raise UserError(
                f"decoder: {vae.name} reads latents of {vae.latent_channels} channels, {model.name} makes {makes}; choose "
                "auto, or the decoder it was trained with."
            )
        return io.NodeOutput(host.Loaded.of(model, vae), vae)


class LoadLlamaGen(io.ComfyNode):
    """A LlamaGen or PAR and its decoder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        models = _menu("llamagen", LLAMAGEN_FOLDERS)
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
            inputs=[
                io.Combo.Input(
                    "checkpoint",
                    options=models,
                    default=models[0],
                    tooltip="Entries that begin with demo are built in and need no network. Your own files go into models/fastar "
                    "(.safetensors, .pt). Entries with a size are downloaded when the graph runs; larger models draw better and slower.",
                ),
                io.Combo.Input(
                    "decoder",
                    options=[AUTO, *_menu("vq", VQ_FOLDERS)],
                    default=AUTO,
                    tooltip="The VQ tokenizer that turns tokens into pictures. auto takes the one the checkpoint was trained with; "
                    "another one's codes mean something else.",
                ),
                io.Combo.Input(
                    "grid",
                    options=[AUTO, *map(str, GRIDS)],
                    default=AUTO,
                    tooltip="Tokens along one side of the picture. auto takes what the file or its name says. Only for files that say "
                    "nothing: 16 for 256 pixels, 24 for 384, 32 for 512. Another one than it was trained with draws nonsense.",
                ),
                io.Combo.Input(
                    "dtype",
                    options=[AUTO, *DTYPES],
                    default=AUTO,
                    tooltip="Precision of the model. auto: bf16 on a graphics card that has it, which is what the models were made "
                    "with, else fp16 or fp32. fp32 is exact and takes twice the memory. The decoder is fp32 in any case.",
                ),
            ],
            outputs=[
                TOKEN_MODEL.Output(
                    "model", display_name="model", tooltip="For LlamaGen, PAR, ZipAR and MuLo-SD Sampler."
                ),
                io.Vae.Output("vae", display_name="vae", tooltip="For VAE Decode and VAE Encode."),
            ],
        )

    @classmethod
    def validate_inputs(cls, checkpoint: Any = None, decoder: Any = None) -> bool | str:
        return _valid([(checkpoint, "llamagen", LLAMAGEN_FOLDERS), (decoder, "vq", VQ_FOLDERS)])

    @classmethod
    def execute(cls, checkpoint: str, decoder: str, grid: str, dtype: str) -> io.NodeOutput:
        computes = choose_dtype(dtype, host.device(), bf16=True)
        side = _side(grid)
        path = _resolve(checkpoint, "llamagen", LLAMAGEN_FOLDERS)
        model = load_llamagen(path, _name(computes), host.offload_device(), side)
        chosen = decoder
        if decoder == AUTO:
            chosen = hub.decoder_for(checkpoint, path, "llamagen", model.net.config.condition == "text")
        vq = load_vq(_resolve(chosen, "vq", VQ_FOLDERS), AUTO, host.offload_device())
        expect_codes(vq, model)
        vae = make_vae(vq)
        return io.NodeOutput(host.Loaded.of(model, vae, _up_sampler(chosen)), vae)


class LoadTar(io.ComfyNode):
    """Tar's language model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        models = _menu("tar", TAR_FOLDERS)
        return schema(
            node_id="FastARLoadTar",
            display_name="Load Tar",
            category="FastAR/load",
            description="Loads the language model of Tar, which turns a prompt into the semantic codes of a picture. A de-tokenizer of any "
            "size draws from those. Official models are downloaded when the graph runs, once, into models/fastar.",
            search_aliases=["tar loader", "text to image", "language model", "qwen", "load checkpoint"],
            inputs=[
                io.Combo.Input(
                    "checkpoint",
                    options=models,
                    default=usual(models, "demo-tar", "tar-1.5b"),
                    tooltip="Entries that begin with demo are built in and need no network. Your own go into models/fastar, as a folder "
                    "with config.json and tokenizer. Entries with a size are downloaded when the graph runs. 7b follows prompts better "
                    "than 1.5b, takes five times the memory and is slower.",
                ),
                io.Combo.Input(
                    "dtype",
                    options=[AUTO, *DTYPES],
                    default=AUTO,
                    tooltip="Precision of the model. auto: bf16 on a graphics card that has it, which is what it was made with, else fp16 "
                    "or fp32. fp32 is exact and takes twice the memory.",
                ),
            ],
            outputs=[TAR.Output("tar", display_name="tar", tooltip="For Tar Prompt.")],
        )

    @classmethod
    def validate_inputs(cls, checkpoint: Any = None) -> bool | str:
        return _valid([(checkpoint, "tar", TAR_FOLDERS)])

    @classmethod
    def execute(cls, checkpoint: str, dtype: str) -> io.NodeOutput:
        computes = choose_dtype(dtype, host.device(), bf16=True)
        path = _resolve(checkpoint, "tar", TAR_FOLDERS)
        return io.NodeOutput(host.Loaded.of(load_tar(path, _name(computes), host.offload_device())))


class LoadTarDetokenizer(io.ComfyNode):
    """A de-tokenizer of Tar, with the TA-Tok and the decoder that belong to it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        models = _menu("dtok", TAR_FOLDERS)
        return schema(
            node_id="FastARLoadTarDetokenizer",
            display_name="Load Tar De-tokenizer",
            category="FastAR/load",
            description="Loads what draws a picture of Tar's semantic codes: an AR-DTok of one size, the TA-Tok that tells it what the "
            "codes mean, and the VQ tokenizer that turns its tokens into pictures. Fits every Tar language model.",
            search_aliases=["ar-dtok", "detokenizer", "tar decoder", "ta-tok", "vqgan", "load checkpoint"],
            inputs=[
                io.Combo.Input(
                    "checkpoint",
                    options=models,
                    default=usual(models, "demo-dtok", "demo-dtok-low", "ar-dtok-512"),
                    tooltip="The number is the side of the picture in pixels; larger is sharper and slower: 256, 1024 and 4096 tokens. "
                    "Entries that begin with demo are built in. Your own files go into models/fastar (.pth, .safetensors).",
                ),
                io.Combo.Input(
                    "ta_tok",
                    options=[AUTO, *_menu("ta-tok", TAR_FOLDERS)],
                    default=AUTO,
                    tooltip="What turns semantic codes into the features it draws from. auto takes the one it was trained with; another "
                    "one's codes mean something else. It takes memory only while the codes are read.",
                ),
                io.Combo.Input(
                    "decoder",
                    options=[AUTO, *_menu("vq", VQ_FOLDERS)],
                    default=AUTO,
                    tooltip="The VQ tokenizer that turns tokens into pictures. auto takes the one the checkpoint was trained with; "
                    "another one's codes mean something else.",
                ),
                io.Combo.Input(
                    "dtype",
                    options=[AUTO, *DTYPES],
                    default=AUTO,
                    tooltip="Precision of the de-tokenizer and of TA-Tok. auto: bf16 on a graphics card that has it, which is what they "
                    "were made with, else fp16 or fp32. fp32 is exact and takes twice the memory. The decoder is fp32 in any case.",
                ),
                io.Combo.Input(
                    "grid",
                    options=[AUTO, *map(str, GRIDS)],
                    default=AUTO,
                    advanced=True,
                    tooltip="Tokens along one side of the picture. auto takes what the file or its name says. Only for files that say "
                    "nothing: 16 for 256 pixels, 32 for 512, 64 for 1024. Another one than it was trained with draws nonsense.",
                ),
            ],
            outputs=[
                TOKEN_MODEL.Output("model", display_name="model", tooltip="For LlamaGen, ZipAR and MuLo-SD Sampler."),
                io.Vae.Output("vae", display_name="vae", tooltip="For VAE Decode and VAE Encode."),
            ],
        )

    @classmethod
    def validate_inputs(cls, checkpoint: Any = None, ta_tok: Any = None, decoder: Any = None) -> bool | str:
        return _valid([(checkpoint, "dtok", TAR_FOLDERS), (ta_tok, "ta-tok", TAR_FOLDERS), (decoder, "vq", VQ_FOLDERS)])

    @classmethod
    def execute(cls, checkpoint: str, ta_tok: str, decoder: str, dtype: str, grid: str = AUTO) -> io.NodeOutput:
        computes, side = _name(choose_dtype(dtype, host.device(), bf16=True)), _side(grid)
        path = _resolve(checkpoint, "dtok", TAR_FOLDERS)
        waits, inside = host.offload_device(), parts_inside(path)
        model = load_detokenizer(path, computes, waits, side)
        parts: dict[str, host.Loaded] = {}
        # One that draws from the codes themselves needs none.
        if ta_tok != AUTO or model.net.config.condition == "features":
            own = ta_tok == AUTO and "ta-tok" in inside
            chosen = hub.ta_tok_for(checkpoint, path) if ta_tok == AUTO else ta_tok
            reader = load_ta_tok(
                path if own else _resolve(chosen, "ta-tok", TAR_FOLDERS), computes, waits, encoder=False
            )
            expect_features(reader, model)
            model, parts[TA_TOK] = replace(model, ta_tok=reader), host.Loaded.of(reader)
        own = decoder == AUTO and "vq" in inside
        chosen = hub.decoder_for(checkpoint, path, "dtok") if decoder == AUTO else decoder
        vq = load_vq(path if own else _resolve(chosen, "vq", VQ_FOLDERS), AUTO, waits)
        expect_codes(vq, model)
        vae = make_vae(vq)
        return io.NodeOutput(host.Loaded.of(model, vae, {**parts, **({} if own else _up_sampler(chosen))}), vae)


NODES: list[type[io.ComfyNode]] = [LoadMAR, LoadLlamaGen, LoadTar, LoadTarDetokenizer]
