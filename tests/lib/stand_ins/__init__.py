"""Nodes for a ComfyUI under test: models of other packs that answer every call, and nodes that tell what they get."""

import json
from typing import Any
from unittest.mock import MagicMock

import comfy.ldm.models.autoencoder
import comfy.sd
import torch


class _AnyType(str):
    """Fits every socket."""

    def __ne__(self, other: object) -> bool:
        return False


ANY = _AnyType("*")


def _conditioning() -> list[Any]:
    return [[torch.zeros(1, 4, 8), {"pooled_output": torch.zeros(1, 8)}]]


def _latent_of_meshes() -> dict[str, Any]:
    return {"samples": torch.zeros(1, 32, 4, 1), "coords": torch.zeros(4, 4, dtype=torch.int32)}


def _merged(*parts: Any) -> dict[str, Any]:
    """State dicts of a model's parts in one, as core's models merge them."""
    return {name: weight for part in parts if isinstance(part, dict) for name, weight in part.items()}


def _model(kind: str) -> Any:
    """An object with every attribute; a few have values with which nodes compute."""
    model = MagicMock(name=kind)
    model.load_device = model.patcher.load_device = torch.device("cpu")
    model.load_model.return_value = model

    model.encode_from_tokens_scheduled.side_effect = lambda *a, **k: _conditioning()
    model.encode_image.return_value.image_embeds = torch.zeros(1, 8)
    model.model.return_value = [torch.zeros(1, 4, 8)]
    model.model.additional_in_dim = 0
    model.model_dtype.return_value = torch.float32

    latent_format = model.get_model_object.return_value
    latent_format.process_in.side_effect = latent_format.process_out.side_effect = lambda x: x

    model.state_dict_for_saving.side_effect = _merged
    model.get_sd.return_value = {}
    return model


class StandIn:
    RETURN_TYPES = (ANY,)
    FUNCTION = "make"
    CATEGORY = "test"
    MADE = {"CONDITIONING": _conditioning, "LATENT OF MESHES": _latent_of_meshes}

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"kind": ("STRING", {})}}

    def make(self, kind: str) -> tuple[Any]:
        make = self.MADE.get(kind)
        return (_model(kind) if make is None else make(),)


def describe(value: Any) -> Any:
    """Shapes in place of tensors, names of types in place of other objects."""
    if isinstance(value, torch.Tensor):
        return list(value.shape)
    if isinstance(value, dict):
        return {name: describe(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [describe(part) for part in value]
    return type(value).__name__


class Tell:
    RETURN_TYPES = ()
    FUNCTION = "tell"
    CATEGORY = "test"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": (ANY, {})}}

    def tell(self, value: Any) -> dict[str, Any]:
        return {"ui": {"text": [json.dumps(describe(value))]}}


class Changes:
    """Tells the largest difference of two latents in each column."""

    RETURN_TYPES = ()
    FUNCTION = "compare"
    CATEGORY = "test"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"before": ("LATENT", {}), "after": ("LATENT", {})}}

    def compare(self, before: Any, after: Any) -> dict[str, Any]:
        columns = (after["samples"] - before["samples"]).abs().amax((0, 1, 2))
        return {"ui": {"text": [json.dumps(columns.tolist())]}}


def _core_vae() -> Any:
    """A small VAE of core's own."""
    config = {"double_z": True, "z_channels": 4, "resolution": 32, "in_channels": 3, "out_ch": 3, "ch": 32}
    config |= {"ch_mult": [1], "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0}
    about = {"params": {"embed_dim": 4, "ddconfig": config}}
    net = comfy.ldm.models.autoencoder.AutoencoderKL(**about["params"])
    return comfy.sd.VAE(sd=net.state_dict(), config=about)


class AsCores:
    """Compares a VAE with one of core's."""

    RETURN_TYPES = ()
    FUNCTION = "compare"
    CATEGORY = "test"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"vae": ("VAE", {})}}

    def compare(self, vae: Any) -> dict[str, Any]:
        names = [name for name in dir(_core_vae()) if not name.startswith("_")]
        missing = []
        for name in names:
            try:
                getattr(vae, name)
            except Exception as problem:
                missing.append([name, type(problem).__mro__[1].__name__])

        # As other packs decode: the network by hand, between core's two functions.
        pixels = torch.linspace(0, 1, 64 * 64 * 3).view(1, 64, 64, 3)
        latents = vae.encode(pixels)
        images = vae.decode(latents)
        drawn = vae.first_stage_model.decode(latents.to(vae.device, vae.vae_dtype)).float()
        vae.process_output(drawn)
        vae.throw_exception_if_invalid()

        told = {
            "is core's": isinstance(vae, comfy.sd.VAE),
            "names": len(names),
            "missing": missing,
            "bytes": vae.model_size() - sum(weight.nbytes for weight in vae.first_stage_model.state_dict().values()),
            "images at once": getattr(vae, "prepare_decode", lambda shape: 1)(latents.shape),  # new in 0.33
            "dynamic": getattr(vae, "is_dynamic", lambda: False)(),  # new in 0.28
            "frames": vae.temporal_compression_decode(),
            "pixels": [vae.spacial_compression_encode(), vae.spacial_compression_decode()],
            "dtypes": [str(dtype) for dtype in (vae.vae_output_dtype(), images.dtype, latents.dtype)],
            "by hand": float((drawn.movedim(1, -1) - images).abs().max()),
            "uncropped": list(vae.vae_encode_crop_pixels(torch.zeros(1, 9, 9, 4)).shape),
        }
        return {"ui": {"text": [json.dumps(told)]}}


NODE_CLASS_MAPPINGS = {"StandIn": StandIn, "Tell": Tell, "Changes": Changes, "AsCores": AsCores}
