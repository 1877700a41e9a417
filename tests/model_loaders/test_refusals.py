"""The refusals of the loaders as a table: what a file is, what
the message names, and its remedy, followed to a model that loads.

``follow`` does what the message says. A row without one has a remedy that needs another file ("get the file again"):
there the valid file itself is loaded in its place.
"""

import argparse
import gzip
import io
import json
import pickle
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.files import checkpoint
from fastar_nodes.model_loaders.llamagen.loader import load_llamagen
from fastar_nodes.model_loaders.mar.loader import load_mar
from fastar_nodes.networks.llama import Llama, LlamaConfig
from fastar_nodes.networks.mar import MAR, MARConfig
from safetensors.torch import load_file, save, save_file

Follow = Callable[[Path], Path]

TINY = MARConfig(16, 1, 1, heads=2, buffer=2, tokens=4, channels=4, classes=3, head_depth=1, head_width=8)
GPT = LlamaConfig(dim=16, depth=1, heads=2, kv_heads=2, hidden=24, vocab=20, condition="class", condition_size=3)
G = torch.Generator().manual_seed(0)
STATE = {name: torch.randn(t.shape, generator=G) for name, t in MAR(TINY).state_dict().items()}
NET = MAR(TINY)
NET.load_state_dict(STATE)
CODES = {name: torch.randn(t.shape, generator=G) for name, t in Llama(GPT).state_dict().items()}
HEADS = {"heads": "2"}
VALID = save(STATE, HEADS)
FIRST = "class_emb.weight"
MATRICES = [name for name, tensor in STATE.items() if tensor.ndim == 2 and name.endswith(".weight")]


class Thing:
    """An object beside the weights."""


@dataclass(frozen=True)
class Row:
    """One refusal."""

    what: str
    content: Callable[[], Any]  # bytes of the file, or what torch.save writes
    found: str  # what the message says about the file
    remedy: str
    follow: Follow | None = None
    name: str = "x.safetensors"
    load: Callable[..., Any] = load_mar
    options: dict[str, Any] = field(default_factory=dict)  # of the loader
    then: dict[str, Any] = field(default_factory=dict)  # of the loader, by the remedy


def saved(content: object, **options: Any) -> Callable[[], bytes]:
    """Bytes of torch.save."""

    def write() -> bytes:
        out = io.BytesIO()
        torch.save(content, out, **options)
        return out.getvalue()

    return write


def stored(state: dict, **metadata: str) -> Callable[[], bytes]:
    """Bytes of safetensors."""
    return lambda: save(state, HEADS | metadata)


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


def unzip(path: Path) -> Path:
    with zipfile.ZipFile(path) as file:
        return Path(file.extract(file.namelist()[0], path.parent))


def untar(path: Path) -> Path:
    with tarfile.open(path) as file:
        content = file.extractfile(file.getnames()[0])
        assert content is not None
        (path.parent / "inside.safetensors").write_bytes(content.read())
    return path.parent / "inside.safetensors"


def gunzip(path: Path) -> Path:
    (path.parent / "inside.safetensors").write_bytes(gzip.decompress(path.read_bytes()))
    return path.parent / "inside.safetensors"


def trusted(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(path, weights_only=False)


def save_state_alone(path: Path) -> Path:
    """Load it with torch.load(weights_only=False) and save its state_dict alone."""
    content = trusted(path)
    content = content.get("model", content) if isinstance(content, dict) else content
    state = content.state_dict() if isinstance(content, torch.nn.Module) else content
    torch.save({"model": {k: torch.as_tensor(v) for k, v in state.items()}, "args": {"heads": 2}}, path.parent / "y.pt")
    return path.parent / "y.pt"


def save_dense(path: Path) -> Path:
    """Save its state_dict again with to_dense() of every weight."""
    state = {name: tensor.to_dense() for name, tensor in trusted(path).items()}
    torch.save({"model": state, "args": {"heads": 2}}, path)
    return path


def unpickle(path: Path) -> Path:
    """Load it with pickle.load and save its weights with torch.save."""
    torch.save({"model": pickle.loads(path.read_bytes()), "args": {"heads": 2}}, path)
    return path


def quantised_by_torch() -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        return saved({**STATE, FIRST: torch.quantize_per_tensor(STATE[FIRST], 0.1, 0, torch.qint8)})()


def save_first_alone(path: Path) -> Path:
    """Of several sets of weights, save one."""
    content = trusted(path)
    state = content[0] if isinstance(content, list) else next(iter(content.values()))
    torch.save({"model": state, "args": {"heads": 2}}, path)
    return path


def rename(path: Path) -> Path:
    return path.rename(path.with_suffix(".pt"))


def save_without(*names: str) -> Follow:
    """Save the file without these weights."""

    def follow(path: Path) -> Path:
        save_file({k: v for k, v in load_file(path).items() if k not in names}, path, HEADS)
        return path

    return follow


def save_without_metadata(path: Path) -> Path:
    save_file(load_file(path), path)
    return path


def with_heads(path: Path) -> Path:
    """State the head count in the file."""
    if path.suffix == ".safetensors":
        save_file(load_file(path), path, {"heads": "2"})
    else:
        torch.save({"model": torch.load(path), "args": {"heads": 2}}, path)
    return path


def corrected(**metadata: str) -> Follow:
    """Correct the metadata."""

    def follow(path: Path) -> Path:
        save_file(load_file(path), path, HEADS | metadata)
        return path

    return follow


def changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], bytes]:
    return stored(STATE | {FIRST: change(STATE[FIRST])})


def beside(suffix: str) -> Callable[[], bytes]:
    """The weights, and one more tensor for each matrix."""
    return stored(STATE | {name.removesuffix("weight") + suffix: torch.ones(1) for name in MATRICES})


def in_format(layer: dict[str, torch.Tensor], **metadata: str) -> Callable[[], bytes]:
    """The weights, those of every block in another program's format: the tensors that it has in the place of each."""
    state = dict(STATE)
    for name in BLOCKS:
        del state[name]
        state |= {name.removesuffix("weight") + part: tensor.clone() for part, tensor in layer.items()}
    return stored(state, **metadata)


def text(**about: Any) -> torch.Tensor:
    """A statement of ComfyUI about a layer."""
    return torch.tensor([*json.dumps(about).encode()], dtype=torch.uint8)


BLOCKS = [name for name in MATRICES if "_blocks." in name]
BYTES, WORDS, HALVES = torch.ones(16, 8, dtype=torch.uint8), torch.ones(2, 16, dtype=torch.int32), torch.ones(16, 2)
FP8, SCALES = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1).to(torch.float8_e4m3fn)
ONE, INDEX = torch.ones(1), torch.zeros(16, dtype=torch.int32)

PLAIN = (
    "get the fp32, bf16 or fp16 file of the same model; ComfyUI also loads its own fp8, int8 and asym_w4a8_int8 files"
)
UNPACK, CHOOSE = "unpack it and choose the file inside", "choose a .safetensors file or a torch checkpoint"
AGAIN, COPY = "get the file again", "get an unchanged copy of the file"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
PAGE, LOGIN = b"<!DOCTYPE html><html>login</html>", "log in if it asks, and get the file there"
MANY = {f"{i}.diffloss.net.x": torch.ones(1) for i in range(3)}

ROWS = (
    # 1. What is no weight file.
    Row("empty", bytes, "is empty (0 bytes)", AGAIN),
    Row("eight bytes", lambda: VALID[:8], "is cut short: it has 8 bytes", AGAIN),
    Row("Git LFS", lambda: LFS, "is a Git LFS pointer", "git lfs pull"),
    Row("Git LFS with a byte order mark", lambda: b"\xef\xbb\xbf" + LFS, "is a Git LFS pointer", "git lfs pull"),
    Row("web page", lambda: PAGE, "is a web page", LOGIN),
    Row("web page with a byte order mark", lambda: b"\xef\xbb\xbf\r\n" + PAGE, "is a web page", LOGIN),
    Row("server's error", lambda: b'{"error":"Invalid user"}', "is a JSON text, not weights ('{\"error\":", CHOOSE),
    Row("server's text", lambda: b"Entry not found", "is a text, not weights ('Entry not found')", CHOOSE),
    Row("index", lambda: b'{"metadata":{},"weight_map":{}}', "is the index of several weight files", "that it names"),
    Row("GGUF", lambda: b"GGUF\3\0\0\0\0\0", "is a GGUF file", "get the .safetensors file of the same model (fp32, "),
    Row("noise", lambda: bytes(range(256)), "is not a weight file of a known format", CHOOSE),
    Row("gzip", lambda: gzip.compress(VALID), "is a gzip archive", UNPACK, gunzip, "x.safetensors.gz"),
    Row("tar", tarred, "is a tar archive", UNPACK, untar, "x.tar"),
    Row("zip", zipped, "is a zip archive without a checkpoint", UNPACK, unzip, "x.zip"),
    # 2. Damaged files.
    Row("truncated", lambda: VALID[:-1], "is damaged or cut short (", COPY),
    Row("longer", lambda: VALID + b"\n", "is damaged or cut short (", COPY),
    Row("header that is no JSON", lambda: (8).to_bytes(8, "little") + b"{not it}", "is damaged or cut short", COPY),
    Row("long header", stored(STATE, log="x" * 25_000_000), "has a header of 25.0 MB, more than the limit of 25 MB",
        "save its weights again with safetensors.torch.save_file, without metadata", save_without_metadata,
        then={"heads": 2}),
    # 3. Pickles.
    Row("before 2020", saved({"model": STATE}, _use_new_zipfile_serialization=False), "format of before 2020",
        "load it with torch.load and save its weights again with torch.save", save_state_alone, "x.pth"),
    Row("bare pickle", lambda: pickle.dumps(3), "is a bare pickle, which torch.save did not write",
        "load it with pickle.load and save its weights with torch.save"),
    Row("pickled weights", lambda: pickle.dumps(STATE), "is a bare pickle, which torch.save did not write",
        "load it with pickle.load and save its weights with torch.save", unpickle, "x.pth"),
    Row("protocol 4", saved({"model": STATE}, pickle_protocol=4), "not a checkpoint of torch.save (Unsupported operand",
        "save its state_dict again with torch.save", save_state_alone, "x.pth"),
    Row("named safetensors", saved({"model": STATE, "args": {"heads": 2}}), "is a torch checkpoint and not a safeten",
        "rename it to .pt", rename),
    Row("object beside the weights", saved({"model": STATE, "x": Thing()}), ".Thing, which may run code, so nothing",
        "load it with torch.load(weights_only=False) and save its state_dict alone", save_state_alone, "x.pth"),
    Row("NumPy number", saved({"model": STATE, "x": np.float64(1.0)}), "holds numpy.",
        "save its state_dict alone", save_state_alone, "x.pth"),
    Row("NumPy weights", saved({k: v.numpy() for k, v in STATE.items()}), "holds numpy.",
        "save its state_dict alone, as tensors", save_state_alone, "x.pth"),
    Row("sparse", saved({**STATE, FIRST: STATE[FIRST].to_sparse()}), "sparse, quantised or without numbers (class",
        "save its weights again as plain tensors, for example with to_dense()", save_dense, "x.pth"),
    Row("without numbers", saved({**STATE, FIRST: STATE[FIRST].to("meta")}), "is sparse, quantised or without numbers",
        "save its weights again as plain tensors", name="x.pth"),
    Row("quantised tensor", quantised_by_torch, "sparse, quantised or without numbers (",
        "or choose another file", name="x.pth"),
    Row("whole module", saved(NET), "holds fastar_nodes.networks.",
        "save its state_dict alone", save_state_alone, "x.pth"),
    Row("list", saved([STATE]), "holds a list, not a dictionary", "save its state_dict alone", save_first_alone,
        "x.pt"),
    Row("two sets", saved({"first": STATE, "second": STATE}), "several networks of one kind (first., second.)",
        "save the weights of one of them in a file of its own", save_first_alone, "x.pt"),
    Row("no weights", saved({"epoch": 3}), "holds no tensors, only epoch", "choose a file with a model's weights",
        name="x.pt"),
    # 4. Weights for another program.
    Row("bitsandbytes nf4", in_format({"weight": BYTES, "weight.absmax": ONE, "weight.quant_map": ONE,
        "weight.nested_absmax": ONE, "weight.quant_state.bitsandbytes__nf4": BYTES}), "quantised to nf4", PLAIN),
    Row("bitsandbytes fp4", in_format({"weight": BYTES, "weight.absmax": ONE, "weight.quant_map": ONE,
        "weight.quant_state.bitsandbytes__fp4": BYTES}), "quantised to fp4", PLAIN),
    Row("bitsandbytes int8", in_format({"weight": BYTES.to(torch.int8), "SCB": ONE, "weight_format": BYTES[0]}),
        "weights that bitsandbytes quantised", PLAIN),
    Row("GPTQ", in_format({"qweight": WORDS, "qzeros": WORDS, "scales": HALVES, "g_idx": INDEX}),
        "weights that GPTQ quantised", PLAIN),
    Row("AWQ", in_format({"qweight": WORDS, "qzeros": WORDS, "scales": HALVES}), "weights that AWQ quantised", PLAIN),
    Row("EXL2", in_format({"q_weight": WORDS, "q_scale": WORDS, "q_scale_max": ONE, "q_groups": INDEX,
        "q_invperm": INDEX}), "ExLlamaV2 quantised", PLAIN),
    Row("Nunchaku, int4", in_format({"qweight": BYTES.to(torch.int8), "wscales": HALVES, "smooth_factor": ONE,
        "smooth_factor_orig": ONE, "proj_down": HALVES, "proj_up": HALVES}), "Nunchaku quantised (SVDQuant)", PLAIN),
    Row("Nunchaku, nvfp4", in_format({"qweight": BYTES.to(torch.int8), "wscales": SCALES, "wtscale": ONE,
        "wcscales": ONE, "lora_down": HALVES, "lora_up": HALVES}), "weights that Nunchaku quantised (SVDQuant)", PLAIN),
    Row("ComfyUI nvfp4", in_format({"weight": BYTES, "weight_scale": SCALES, "weight_scale_2": ONE,
        "comfy_quant": text(format="nvfp4")}), "holds NVFP4 weights, which FastAR", PLAIN),
    Row("ModelOpt nvfp4", in_format({"weight": BYTES, "weight_scale": SCALES, "weight_scale_2": ONE,
        "input_scale": ONE}), "holds NVFP4 weights", PLAIN),
    Row("compressed-tensors nvfp4", in_format({"weight_packed": BYTES, "weight_scale": SCALES,
        "weight_global_scale": ONE}), "holds NVFP4 weights, which", PLAIN),
    Row("ComfyUI mxfp8", in_format({"weight": FP8, "weight_scale": BYTES[:, :1], "comfy_quant": text(format="mxfp8")}),
        "weights in a quantised format of ComfyUI, which", PLAIN),
    Row("mxfp8", in_format({"weight": FP8, "weight_scale": BYTES[:, :1]}), "weights with scales beside", PLAIN),
    Row("mxfp4", stored(STATE | {"a.gate_up_proj_blocks": BYTES, "a.gate_up_proj_scales": BYTES.clone()}),
        "holds MXFP4 weights", PLAIN),
    Row("ComfyUI, 4 bits rotated", in_format({"weight": BYTES.to(torch.int8), "weight_scale": HALVES,
        "comfy_quant": text(format="convrot_w4a4")}), "holds weights in convrot_w4a4, which rounds", PLAIN),
    Row("ComfyUI, 4 and 8 bits", in_format({"weight": BYTES.to(torch.int8), "weight_s_rel": SCALES,
        "weight_s_channel": ONE, "comfy_quant": text(format="asym_w4a8_int8")}), "ComfyUI format of 4 bits", PLAIN),
    Row("ComfyUI, int8 rotated", in_format({"weight": FP8.to(torch.int8), "weight_scale": ONE,
        "comfy_quant": text(format="int8_tensorwise", convrot=True)}), "in a quantised format of ComfyUI", PLAIN),
    Row("ComfyUI, a later format", stored(STATE, _quantization_metadata=json.dumps({"layers": {
        BLOCKS[0].removesuffix(".weight"): {"format": "fp6_new"}}})), "(_quantization_metadata in its", PLAIN),
    Row("smoothed inputs", in_format({"weight": FP8, "weight_scale": ONE, "pre_quant_scale": ONE}),
        "weights with smoothed inputs (pre_quant_scale)", PLAIN),
    Row("fp8 of DeepSeek", in_format({"weight": FP8, "weight_scale_inv": torch.ones(1, 1)}),
        "fp8 weights with a scale for every block, as of DeepSeek", PLAIN),
    Row("fp8 in blocks", in_format({"weight": FP8, "weight_scale": torch.ones(16, 2)}),
        "holds quantised weights with scales", PLAIN),
    Row("scale of plain weights", beside("weight_scale"), "weights with scales beside them", PLAIN),
    Row("compressed-tensors", in_format({"weight_packed": WORDS, "weight_scale": HALVES, "weight_shape": INDEX[:2]}),
        "packed weights of compressed-tensors", PLAIN),
    Row("HQQ", in_format({"W_q": BYTES, "meta": ONE}), "weights that HQQ quantised", PLAIN),
    Row("quanto", in_format({"weight._data": BYTES.to(torch.int8), "weight._scale": HALVES, "input_scale": ONE}),
        "weights that quanto quantised", PLAIN),
    Row("MLX", in_format({"weight": WORDS.to(torch.int64), "scales": HALVES, "biases": HALVES}), "that MLX quantised",
        PLAIN),
    Row("by metadata", stored(STATE, quantization_config="{}"), "holds quantised weights", PLAIN),
    Row("packed bytes", changed(lambda t: t.to(torch.uint8)), "uint8 and no plain weights in class_emb.weight", PLAIN),
    Row("LoRA", stored({f"base_model.model.{FIRST}.lora_A.weight": torch.ones(2, 2)}), "holds a LoRA", "merge it into"),
    Row("LoRA of kohya", stored({"lora_unet_x.lora_down.weight": torch.ones(2, 2)}), "holds a LoRA", "merge it into"),
    # 5. Weights that do not fit.
    Row("unknown names", stored({"a.b.c": torch.ones(1)}), "holds no weights of a MAR, but a.b",
        "choose a file with a MAR"),
    Row("another family", stored(CODES), "holds a LlamaGen, not a MAR", "load it with Load LlamaGen / PAR",
        lambda path: path, then={"load": load_llamagen, "grid": 4}),
    Row("several networks", stored(MANY), "several networks of one kind (0., 1., 2.)", "in a file of its own"),
    Row("unexpected", stored(STATE | {"extra": torch.ones(1)}), "does not fit a MAR: 1 unexpected (extra)",
        "save the file without them", save_without("extra")),
    Row("missing", stored({k: v for k, v in STATE.items() if k != "mask_token"}), "1 missing (mask_token)", COPY),
    Row("misshaped", stored(STATE | {"mask_token": torch.ones(3)}), "(mask_token is 3, not 1x1x16)", COPY),
    Row("empty tensor", changed(lambda t: t[:0]), "a tensor that is empty or too large (class_emb.weight: 0x16)", COPY),
    Row("NaN", changed(lambda t: t * float("nan")), "holds NaN or infinite weights in class_emb.weight",
        "get it again, or choose another file"),
    Row("too large for fp16", changed(lambda t: t * 0 + 1e6), "has weights too large for torch.float16",
        "choose dtype bf16 or fp32", lambda path: path, options={"dtype": "fp16"}, then={"dtype": "bf16"}),
    # 6. What a file does not state, or states wrongly.
    Row("width, safetensors", lambda: save(STATE), "has the width 16, which no official model has",
        "an entry 'heads' of the metadata (.safetensors)", with_heads),
    Row("width, pickle", saved(STATE), "does not state its number of attention heads",
        "or of the dictionary 'args' beside the weights (torch.save)", with_heads, "x.pth"),
    Row("width of a GPT", saved(CODES), "has the width 16, which no official model has", "of the dictionary 'args'",
        with_heads, "x_256.pth", load_llamagen),
    Row("text for a number", stored(STATE, t_max="many"), "states t_max = many, which must be a whole number",
        "correct t_max or remove it", corrected(t_max="900")),
    Row("patch", stored(STATE, patch="3"), "states a patch size of 3, but its tokens have 4 channels",
        "correct its patch", corrected(patch="2")),
    Row("no size", stored(CODES), "does not state the size of its images", "choose 16 (256 pixels)",
        lambda path: path, load=load_llamagen, then={"grid": 16}),
    Row("no averaged weights", stored(STATE), "does not hold averaged (EMA) weights", "choose auto", lambda path: path,
        options={"weights": "ema"}, then={"weights": "auto"}),
    Row("no trained weights", saved({"model_ema": STATE, "args": {"heads": 2}}), "holds averaged (EMA) weights only",
        "choose auto", lambda path: path, "x.pth", options={"weights": "trained"}, then={"weights": "auto"}),
    Row("classes", saved({"model": CODES, "args": {"heads": 2, "image_size": 64}}), "has 4 class rows, which are not 9",
        "state 3 (with) or 4 (without)", lambda path: path, "x.pth", load_llamagen, {"classes": 9}, {"classes": 3}),
)  # fmt: skip


@pytest.fixture(autouse=True)
def outside_comfyui(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "gather_quantised", None)


@pytest.fixture(scope="module")
def check_valid(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], None]:
    """Loads a valid file of a name, once for every name."""

    @cache
    def check(name: str) -> None:
        path = tmp_path_factory.mktemp("valid") / name
        path.write_bytes(VALID)
        assert load_mar(path).net.config == TINY

    return check


@pytest.mark.fast_cases(every=3)
@pytest.mark.parametrize("row", ROWS, ids=[row.what for row in ROWS])
def test_refusal_and_remedy(row: Row, tmp_path: Path, check_valid: Callable[[str], None]) -> None:
    path = tmp_path / row.name
    path.write_bytes(row.content())
    with pytest.raises(UserError) as error:
        row.load(path, **row.options)
    text = str(error.value)
    found, separator, remedy = text.rpartition("; ")
    assert separator and row.found in found, text
    assert row.remedy in remedy or row.remedy in text, text
    assert path.name in text and "\n" not in text and len(text) <= 400
    if row.follow is None:
        check_valid(row.name)
        return
    then = dict(row.then)
    load = then.pop("load", row.load)
    assert load(row.follow(path), **then).net.config.heads == 2


def test_rows_are_told_apart() -> None:
    assert len({row.what for row in ROWS}) == len(ROWS)
    assert len({(row.found, row.name) for row in ROWS}) > 0.8 * len(ROWS)


def test_arguments_of_a_training_are_no_refusal(tmp_path: Path) -> None:
    """What an ordinary training writes beside its weights."""
    beside = {
        "epoch": 1,
        "args": argparse.Namespace(lr=0.1, dtype=torch.bfloat16, device=torch.device("cuda:0")),
        "heads": 2,
    }
    torch.save({"model": STATE, **beside}, tmp_path / "x.pth")
    assert load_mar(tmp_path / "x.pth", heads=2).net.config == TINY
