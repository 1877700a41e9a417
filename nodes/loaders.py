"""Loaders: a file becomes a model on our socket and a decoder on core's VAE socket."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..errors import UserError
from ..model_loaders import hub
from ..model_loaders.autoencoders import expect_codes, load_kl, load_vq
from ..model_loaders.checkpoint import DTYPES, choose_dtype
from ..model_loaders.llamagen import load_llamagen
from ..model_loaders.mar import load_mar
from ..model_loaders.networks.kl import KLModel
from ..model_loaders.networks.vq import VQModel
from . import host
from .schema import MAR, TOKEN_MODEL, schema

AUTO = "auto"
# Where a person may have put the files. A decoder may also lie among core's; core's diffusion models are left out, so
# that the menu is not full of files that are no MAR.
MAR_FOLDERS = LLAMAGEN_FOLDERS = (host.FOLDER,)
KL_FOLDERS = VQ_FOLDERS = (host.FOLDER, "vae")
# Tokens along one side that a person may have to name; other ones stand in a file's metadata.
GRIDS = (8, 12, 16, 24, 32, 48, 64)


def _menu(family: str, kinds: tuple[str, ...]) -> list[str]:
    return hub.menu(family, host.local_files(*kinds))


def _resolve(choice: str, family: str, kinds: tuple[str, ...]) -> Any:
    if not isinstance(choice, str):
        raise UserError(f"{hub.FIELDS[family]}: {choice!r} is no file name; choose one from the list.")
    return hub.resolve(choice, family, host.folders(*kinds), host.folders(host.FOLDER)[0], host.progress())


def make_vae(model: KLModel | VQModel) -> host.FastARVAE:
    """An autoencoder for core's VAE nodes."""
    c = model.net.config
    return host.FastARVAE(model.net, model.name, c.stride, c.code_channels if isinstance(model, VQModel) else c.z_channels, c.ch)


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
                    "checkpoint", options=_menu("mar", MAR_FOLDERS), default="demo",
                    tooltip="demo is built in and needs no network. Your own files go into models/fastar (.safetensors, .pth). "
                    "Entries with a size are downloaded when the graph runs; larger models draw better and slower.",
                ),
                io.Combo.Input(
                    "decoder", options=[AUTO, *_menu("kl", KL_FOLDERS)], default=AUTO,
                    tooltip="The autoencoder that turns latents into pictures. auto takes the one the checkpoint was trained "
                    "with; another of the same latents may sharpen or blur.",
                ),
                io.Combo.Input(
                    "dtype", options=[AUTO, *DTYPES], default=AUTO,
                    tooltip="Precision of the MAR. auto: fp16 on a graphics card made for it, else fp32. fp32 is exact and "
                    "needs twice the memory; bf16 is coarser and may show. The diffusion arithmetic and the decoder are fp32.",
                ),
            ],
            outputs=[
                MAR.Output("model", display_name="model", tooltip="For MAR Sampler and its accelerated relatives."),
                io.Vae.Output("vae", display_name="vae", tooltip="For VAE Decode and VAE Encode."),
            ],
        )  # fmt: skip

    @classmethod
    def validate_inputs(cls, checkpoint: Any = None, decoder: Any = None) -> bool | str:
        return _valid([(checkpoint, "mar", MAR_FOLDERS), (decoder, "kl", KL_FOLDERS)])

    @classmethod
    def execute(cls, checkpoint: str, decoder: str, dtype: str) -> io.NodeOutput:
        computes = choose_dtype(dtype, host.device())
        path = _resolve(checkpoint, "mar", MAR_FOLDERS)
        chosen = hub.decoder_for(checkpoint, path) if decoder == AUTO else decoder
        # The network waits on the offload device, but in the precision of the device it will compute on.
        name = next(name for name, kind in DTYPES.items() if kind == computes)
        model = load_mar(path, name, host.offload_device())
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
            search_aliases=["llamagen loader", "par loader", "autoregressive", "vqgan", "load checkpoint", "fastar demo"],
            inputs=[
                io.Combo.Input(
                    "checkpoint", options=models, default=models[0],
                    tooltip="Entries that begin with demo are built in and need no network. Your own files go into models/fastar "
                    "(.safetensors, .pt). Entries with a size are downloaded when the graph runs; larger models draw better and slower.",
                ),
                io.Combo.Input(
                    "decoder", options=[AUTO, *_menu("vq", VQ_FOLDERS)], default=AUTO,
                    tooltip="The VQ tokenizer that turns tokens into pictures. auto takes the one the checkpoint was trained with; "
                    "another one's codes mean something else.",
                ),
                io.Combo.Input(
                    "grid", options=[AUTO, *map(str, GRIDS)], default=AUTO,
                    tooltip="Tokens along one side of the picture. auto takes what the file or its name says. Only for files that say "
                    "nothing: 16 for 256 pixels, 24 for 384, 32 for 512. Another one than it was trained with draws nonsense.",
                ),
                io.Combo.Input(
                    "dtype", options=[AUTO, *DTYPES], default=AUTO,
                    tooltip="Precision of the model. auto: bf16 on a graphics card that has it, which is what the models were made "
                    "with, else fp16 or fp32. fp32 is exact and takes twice the memory. The decoder is fp32 in any case.",
                ),
            ],
            outputs=[
                TOKEN_MODEL.Output("model", display_name="model", tooltip="For LlamaGen, PAR and ZipAR Sampler."),
                io.Vae.Output("vae", display_name="vae", tooltip="For VAE Decode and VAE Encode."),
            ],
        )  # fmt: skip

    @classmethod
    def validate_inputs(cls, checkpoint: Any = None, decoder: Any = None) -> bool | str:
        return _valid([(checkpoint, "llamagen", LLAMAGEN_FOLDERS), (decoder, "vq", VQ_FOLDERS)])

    @classmethod
    def execute(cls, checkpoint: str, decoder: str, grid: str, dtype: str) -> io.NodeOutput:
        computes = choose_dtype(dtype, host.device(), bf16=True)
        side = None if grid == AUTO else next((n for n in GRIDS if str(n) == str(grid)), 0)
        if side == 0:
            raise UserError(f"grid: {grid!r} is none of {AUTO}, {', '.join(map(str, GRIDS))}; choose one of them.")
        path = _resolve(checkpoint, "llamagen", LLAMAGEN_FOLDERS)
        name = next(name for name, kind in DTYPES.items() if kind == computes)
        model = load_llamagen(path, name, host.offload_device(), side)
        chosen = decoder
        if decoder == AUTO:
            chosen = hub.decoder_for(checkpoint, path, "llamagen", model.net.config.condition == "text")
        vq = load_vq(_resolve(chosen, "vq", VQ_FOLDERS), AUTO, host.offload_device())
        expect_codes(vq, model)
        vae = make_vae(vq)
        return io.NodeOutput(host.Loaded.of(model, vae), vae)


NODES: list[type[io.ComfyNode]] = [LoadMAR, LoadLlamaGen]
