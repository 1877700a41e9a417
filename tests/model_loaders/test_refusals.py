"""What the loaders refuse: files that are no weights, pickles of other things, and the formats of other programs, each
by its name and with a remedy.
"""

import argparse
import gzip
import io
import json
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.files import checkpoint
from fastar_nodes.model_loaders.llamagen.loader import load_llamagen
from fastar_nodes.model_loaders.mar.loader import load_mar
from fastar_nodes.networks.llama import Llama, LlamaConfig
from fastar_nodes.networks.mar import MAR, MARConfig
from safetensors.torch import save

TINY = MARConfig(16, 1, 1, heads=2, buffer=2, tokens=4, channels=4, classes=3, head_depth=1, head_width=8)
GPT = LlamaConfig(dim=16, depth=1, heads=2, kv_heads=2, hidden=24, vocab=20, condition="class", condition_size=3)
G = torch.Generator().manual_seed(0)
STATE = {name: torch.randn(t.shape, generator=G) for name, t in MAR(TINY).state_dict().items()}
CODES = {name: torch.randn(t.shape, generator=G) for name, t in Llama(GPT).state_dict().items()}
HEADS = {"heads": "2"}
VALID = save(STATE, HEADS)
FIRST = "class_emb.weight"
MATRICES = [name for name, tensor in STATE.items() if tensor.ndim == 2 and name.endswith(".weight")]
BLOCKS = [name for name in MATRICES if "_blocks." in name]


class Thing:
    """An object beside the weights."""


def saved(content: object, **options: Any) -> bytes:
    """Bytes of torch.save."""
    out = io.BytesIO()
    torch.save(content, out, **options)
    return out.getvalue()


def stored(state: dict, **metadata: str) -> bytes:
    """Bytes of safetensors."""
    return save(state, HEADS | metadata)


def zipped() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("mar/checkpoint-last.safetensors", VALID)
    return out.getvalue()


def tarred() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as file:
        about = tarfile.TarInfo("mar.safetensors")
        about.size = len(VALID)
        file.addfile(about, io.BytesIO(VALID))
    return out.getvalue()


def quantised_by_torch() -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        return saved({**STATE, FIRST: torch.quantize_per_tensor(STATE[FIRST], 0.1, 0, torch.qint8)})


def beside(suffix: str) -> bytes:
    """The weights, and one more tensor for each matrix."""
    return stored(STATE | {name.removesuffix("weight") + suffix: torch.ones(1) for name in MATRICES})


def in_format(layer: dict[str, torch.Tensor]) -> bytes:
    """The weights, those of every block in another program's format: the tensors that it has in the place of each."""
    state = dict(STATE)
    for name in BLOCKS:
        del state[name]
        state |= {name.removesuffix("weight") + part: tensor.clone() for part, tensor in layer.items()}
    return stored(state)


def text(**about: Any) -> torch.Tensor:
    """A statement of ComfyUI about a layer."""
    return torch.tensor([*json.dumps(about).encode()], dtype=torch.uint8)


BYTES, WORDS, HALVES = torch.ones(16, 8, dtype=torch.uint8), torch.ones(2, 16, dtype=torch.int32), torch.ones(16, 2)
FP8, SCALES = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1).to(torch.float8_e4m3fn)
ONE, INDEX = torch.ones(1), torch.zeros(16, dtype=torch.int32)
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"

# Content of a file, and what the message says about it. Others are in test_checkpoint.py.
FILES: dict[str, tuple[bytes, str]] = {
    "Git LFS with a byte order mark": (b"\xef\xbb\xbf" + LFS, "is a Git LFS pointer"),
    "web page with a byte order mark": (b"\xef\xbb\xbf\r\n<!DOCTYPE html><html></html>", "is a web page"),
    "server's error": (b'{"error":"Invalid user"}', "is a JSON text, not weights"),
    "index": (b'{"metadata":{},"weight_map":{}}', "is the index of several weight files"),
    "gzip": (gzip.compress(VALID), "is a gzip archive"),
    "tar": (tarred(), "is a tar archive"),
}
PICKLES: dict[str, tuple[bytes, str]] = {
    "zip": (zipped(), "is a zip archive that torch.save did not write"),
    "protocol 4": (saved({"model": STATE}, pickle_protocol=4), "torch.save did not write it (Unsupported operand"),
    "object beside the weights": (saved({"model": STATE, "x": Thing()}), ".Thing, which may run code, so nothing"),
    "NumPy weights": (saved({k: v.numpy() for k, v in STATE.items()}), "holds numpy."),
    "sparse": (saved({**STATE, FIRST: STATE[FIRST].to_sparse()}), "sparse, quantised or without values (class"),
    "without numbers": (saved({**STATE, FIRST: STATE[FIRST].to("meta")}), "is sparse, quantised or without values"),
    "quantised tensor": (quantised_by_torch(), "sparse, quantised or without values ("),
    "heads": (saved(STATE), "does not state its number of attention heads"),
}
FORMATS: dict[str, tuple[bytes, str]] = {
    "bitsandbytes nf4": (in_format({"weight": BYTES, "weight.absmax": ONE, "weight.quant_map": ONE,
        "weight.nested_absmax": ONE, "weight.quant_state.bitsandbytes__nf4": BYTES}), "quantised to nf4"),
    "bitsandbytes fp4": (in_format({"weight": BYTES, "weight.absmax": ONE, "weight.quant_map": ONE,
        "weight.quant_state.bitsandbytes__fp4": BYTES}), "quantised to fp4"),
    "bitsandbytes int8": (in_format({"weight": BYTES.to(torch.int8), "SCB": ONE, "weight_format": BYTES[0]}),
        "weights that bitsandbytes quantised"),
    "GPTQ": (in_format({"qweight": WORDS, "qzeros": WORDS, "scales": HALVES, "g_idx": INDEX}),
        "weights that GPTQ quantised"),
    "AWQ": (in_format({"qweight": WORDS, "qzeros": WORDS, "scales": HALVES}), "weights that AWQ quantised"),
    "EXL2": (in_format({"q_weight": WORDS, "q_scale": WORDS, "q_scale_max": ONE, "q_groups": INDEX,
        "q_invperm": INDEX}), "ExLlamaV2 quantised"),
    "Nunchaku, int4": (in_format({"qweight": BYTES.to(torch.int8), "wscales": HALVES, "smooth_factor": ONE,
        "smooth_factor_orig": ONE, "proj_down": HALVES, "proj_up": HALVES}), "Nunchaku quantised (SVDQuant)"),
    "Nunchaku, nvfp4": (in_format({"qweight": BYTES.to(torch.int8), "wscales": SCALES, "wtscale": ONE,
        "wcscales": ONE, "lora_down": HALVES, "lora_up": HALVES}), "weights that Nunchaku quantised (SVDQuant)"),
    "ComfyUI nvfp4": (in_format({"weight": BYTES, "weight_scale": SCALES, "weight_scale_2": ONE,
        "comfy_quant": text(format="nvfp4")}), "holds NVFP4 weights, which FastAR"),
    "ModelOpt nvfp4": (in_format({"weight": BYTES, "weight_scale": SCALES, "weight_scale_2": ONE,
        "input_scale": ONE}), "holds NVFP4 weights"),
    "compressed-tensors nvfp4": (in_format({"weight_packed": BYTES, "weight_scale": SCALES,
        "weight_global_scale": ONE}), "holds NVFP4 weights, which"),
    "ComfyUI mxfp8": (in_format({"weight": FP8, "weight_scale": BYTES[:, :1], "comfy_quant": text(format="mxfp8")}),
        "weights in a quantised format of ComfyUI, which"),
    "mxfp8": (in_format({"weight": FP8, "weight_scale": BYTES[:, :1]}), "weights with scales beside"),
    "mxfp4": (stored(STATE | {"a.gate_up_proj_blocks": BYTES, "a.gate_up_proj_scales": BYTES.clone()}),
        "holds MXFP4 weights"),
    "ComfyUI, 4 bits rotated": (in_format({"weight": BYTES.to(torch.int8), "weight_scale": HALVES,
        "comfy_quant": text(format="convrot_w4a4")}), "holds weights in convrot_w4a4, which FastAR does not read"),
    "ComfyUI, 4 and 8 bits": (in_format({"weight": BYTES.to(torch.int8), "weight_s_rel": SCALES,
        "weight_s_channel": ONE, "comfy_quant": text(format="asym_w4a8_int8")}), "ComfyUI format of 4 bits"),
    "ComfyUI, int8 rotated": (in_format({"weight": FP8.to(torch.int8), "weight_scale": ONE,
        "comfy_quant": text(format="int8_tensorwise", convrot=True)}), "in a quantised format of ComfyUI"),
    "ComfyUI, a later format": (stored(STATE, _quantization_metadata=json.dumps({"layers": {
        BLOCKS[0].removesuffix(".weight"): {"format": "fp6_new"}}})), "(_quantization_metadata in its"),
    "smoothed inputs": (in_format({"weight": FP8, "weight_scale": ONE, "pre_quant_scale": ONE}),
        "weights with smoothed inputs (pre_quant_scale)"),
    "fp8 of DeepSeek": (in_format({"weight": FP8, "weight_scale_inv": torch.ones(1, 1)}),
        "fp8 weights with a scale for every block, as in DeepSeek's files"),
    "fp8 in blocks": (in_format({"weight": FP8, "weight_scale": torch.ones(16, 2)}),
        "holds quantised weights with scales"),
    "scale of plain weights": (beside("weight_scale"), "weights with scales beside them"),
    "compressed-tensors": (in_format({"weight_packed": WORDS, "weight_scale": HALVES, "weight_shape": INDEX[:2]}),
        "packed weights of compressed-tensors"),
    "HQQ": (in_format({"W_q": BYTES, "meta": ONE}), "weights that HQQ quantised"),
    "quanto": (in_format({"weight._data": BYTES.to(torch.int8), "weight._scale": HALVES, "input_scale": ONE}),
        "weights that quanto quantised"),
    "MLX": (in_format({"weight": WORDS.to(torch.int64), "scales": HALVES, "biases": HALVES}), "that MLX quantised"),
    "by metadata": (stored(STATE, quantization_config="{}"), "holds quantised weights"),
    "packed bytes": (stored(STATE | {FIRST: STATE[FIRST].to(torch.uint8)}), "instead of ordinary weights in class_emb"),
    "LoRA": (stored({f"base_model.model.{FIRST}.lora_A.weight": torch.ones(2, 2)}), "holds a LoRA"),
    "LoRA of kohya": (stored({"lora_unet_x.lora_down.weight": torch.ones(2, 2)}), "holds a LoRA"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def outside_comfyui(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "gather_quantised", None)


def said(path: Path, content: bytes, load: Callable[..., Any] = load_mar) -> str:
    """The refusal of a file: one sentence, with its name and a remedy."""
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        load(path)
    text = str(error.value)
    assert path.name in text and "; " in text and "\n" not in text and len(text) <= 400, text
    return text


@pytest.mark.fast_cases(every=3)
@pytest.mark.parametrize("what", [*FILES, *FORMATS])
def test_a_file_is_refused_by_what_it_is(what: str, tmp_path: Path) -> None:
    content, found = (FILES | FORMATS)[what]
    assert found in said(tmp_path / "x.safetensors", content)


@pytest.mark.parametrize("what", PICKLES)
def test_a_pickle_is_refused_by_what_it_holds(what: str, tmp_path: Path) -> None:
    content, found = PICKLES[what]
    assert found in said(tmp_path / "x.pth", content)


def test_a_width_without_a_number_of_heads(tmp_path: Path) -> None:
    for content, load in ((save(STATE), load_mar), (save(CODES), load_llamagen)):
        words = said(tmp_path / "x_256.safetensors", content, load)
        assert "has the width 16, which no official model has" in words and "the entry 'heads'" in words


def test_a_pickle_under_the_name_of_safetensors_is_renamed(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    assert "change the ending of its name to .pt" in said(path, saved({"model": STATE, "args": {"heads": 2}}))
    assert load_mar(path.rename(path.with_suffix(".pt"))).net.config == TINY


def test_arguments_of_a_training_are_no_refusal(tmp_path: Path) -> None:
    """What an ordinary training writes beside its weights."""
    arguments = argparse.Namespace(lr=0.1, dtype=torch.bfloat16, device=torch.device("cuda:0"))
    torch.save({"model": STATE, "epoch": 1, "args": arguments, "heads": 2}, tmp_path / "x.pth")
    assert load_mar(tmp_path / "x.pth", heads=2).net.config == TINY
