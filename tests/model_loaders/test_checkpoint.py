"""Reading weight files: every nesting, and every hostile file ends in one sentence and runs nothing."""

import argparse
import json
import os
import pickle
import re
import zipfile
from pathlib import Path

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders import checkpoint
from fastar_nodes.model_loaders.checkpoint import Checkpoint, choose_dtype, load_strictly, read, read_metadata
from fastar_nodes.model_loaders.families import identify
from safetensors.torch import save_file
from torch import nn

STATE = {"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.zeros(2)}

pickled = pytest.mark.skipif(checkpoint._TORCH < (2, 6), reason="older torch refuses pickled files, see below")


def sentence(error: pytest.ExceptionInfo, *words: str) -> str:
    """The message, checked to be one line that holds every one of ``words``."""
    text = str(error.value)
    assert "\n" not in text and len(text) < 1200
    for word in words:
        assert word in text
    return text


def same(state: dict, expected: dict = STATE) -> bool:
    return state.keys() == expected.keys() and all(torch.equal(state[k], expected[k]) for k in state)


# --------------------------------------------------------------------------------------------------- reading


def test_safetensors_with_metadata_whatever_the_extension(tmp_path: Path) -> None:
    path = tmp_path / "weights.ckpt"
    save_file(STATE, path, metadata={"heads": "4", "name": "a small one"})
    file = read(str(path))
    assert same(file.state) and file.metadata == {"heads": "4", "name": "a small one"} and file.path == path
    assert read_metadata(path) == file.metadata


@pickled
@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: s,
        lambda s: {"model": s, "epoch": 3},
        lambda s: {"model": {"other": torch.ones(1)}, "model_ema": s, "args": argparse.Namespace(lr=1e-4, name="x")},
        lambda s: {"state_dict": {f"module.{k}": v for k, v in s.items()}},
        lambda s: {"state_dict": {"model": s}},
        lambda s: {"model": {k: nn.Parameter(v) for k, v in s.items()}},
    ],
    ids=["flat", "model", "ema preferred", "module prefix", "twice", "parameters"],
)
def test_pickled_nestings(tmp_path: Path, wrap) -> None:
    path = tmp_path / "weights.bin"
    torch.save(wrap(STATE), path)
    file = read(path)
    assert same(file.state) and file.metadata == {}
    assert not any(t.requires_grad for t in file.state.values())


def test_prefix_stays_when_not_all_have_it(tmp_path: Path) -> None:
    save_file({"module.a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "x.safetensors")
    assert set(read(tmp_path / "x.safetensors").state) == {"module.a", "b"}


class Payload:
    """Unpickling this carelessly makes a file."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self.canary),)


def saved(canary: Path, path: Path) -> None:
    torch.save({"model": STATE, "args": Payload(canary)}, path)


def saved_legacy(canary: Path, path: Path) -> None:
    torch.save({"model": STATE, "args": Payload(canary)}, path, _use_new_zipfile_serialization=False)


def bare(canary: Path, path: Path) -> None:
    path.write_bytes(pickle.dumps(Payload(canary), 2))


def zipped_by_hand(canary: Path, path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Payload(canary), 2))
        archive.writestr("archive/version", "3\n")


@pytest.mark.parametrize("write", [saved, saved_legacy, bare, zipped_by_hand])
@pytest.mark.parametrize("name", ["weights.pth", "weights.safetensors"])
def test_payload_is_refused_and_not_run(tmp_path: Path, write, name: str) -> None:
    canary, path = tmp_path / "canary", tmp_path / name
    write(canary, path)
    with pytest.raises(UserError) as error:
        read(path)
    assert not canary.exists()
    sentence(error, name, ";")
    pickle.loads(pickle.dumps(Payload(canary)))
    assert canary.is_dir()  # so the payload was live, and a careless reader would have run it


@pickled
def test_payload_sentence_names_what_was_found(tmp_path: Path) -> None:
    saved(tmp_path / "canary", tmp_path / "x.pt")
    with pytest.raises(UserError) as error:
        read(tmp_path / "x.pt", "decoder")
    sentence(error, "decoder: x.pt ", "mkdir", ".safetensors")


@pickled
def test_whole_modules_and_scripts_are_refused(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "module.pt")
    with pytest.raises(UserError) as error:
        read(tmp_path / "module.pt")
    sentence(error, "torch.nn.modules.linear.Linear")


def test_old_torch_refuses_pickles_before_opening_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_TORCH", (2, 5))
    monkeypatch.setattr(torch, "load", None)
    torch.save(STATE, tmp_path / "x.pth")
    with pytest.raises(UserError) as error:
        read(tmp_path / "x.pth")
    sentence(error, "x.pth", "torch 2.6")


def test_reading_leaves_torch_trusting_nobody_new(tmp_path: Path) -> None:
    before = set(torch.serialization.get_safe_globals())
    torch.save({"model": STATE, "args": argparse.Namespace(a=1)}, tmp_path / "x.pth")
    if checkpoint._TORCH >= (2, 6):
        read(tmp_path / "x.pth")
    assert set(torch.serialization.get_safe_globals()) == before


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        read(tmp_path / "gone.safetensors")
    sentence(error, "checkpoint: there is no file", "gone.safetensors", "choose another")
    with pytest.raises(UserError):
        read(tmp_path / ("x" * 5000))
    with pytest.raises(UserError):
        read("x\0y")


def test_folder(tmp_path: Path) -> None:
    (tmp_path / "mar.safetensors").mkdir()
    with pytest.raises(UserError) as error:
        read(tmp_path / "mar.safetensors")
    sentence(error, "folder")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes on this system")
def test_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(UserError) as error:
        read(tmp_path / "x.safetensors")
    sentence(error, "no regular file")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty (0 bytes)"),
        (b"Dear reader, these are not weights.\n", "no weight file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "a Git LFS pointer"),
        (b"\n<!DOCTYPE html><html></html>", "a web page"),
        (b"GGUF\x03\x00\x00\x00\x00\x00", "a GGUF file"),
        (b"\x80\x04N.", "a bare pickle"),
        (b"\x00\x01", "no weight file"),
        (bytes(range(256)) * 4, "no weight file"),
        (b"PK\x03\x04 and then nothing", "rename it"),
        ((2).to_bytes(8, "little") + b"{}", "holds no tensors"),
        ((900).to_bytes(8, "little") + b'{"a": ', "cut short"),
        ((8).to_bytes(8, "little") + b"{not it}", "damaged or cut short"),
        ((7).to_bytes(8, "little") + b"{" + b"[" * 6, "damaged or cut short"),
        ((2**62).to_bytes(8, "little") + b"{}", "no weight file"),
    ],
)
def test_what_is_no_checkpoint(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "mar.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read(path)
    if checkpoint._TORCH >= (2, 6) or not content.startswith(b"PK"):
        sentence(error, "checkpoint: mar.safetensors", words, ";")
    assert read_metadata(path) == {}


def test_truncated_at_every_kind_of_place(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    for write in (lambda: save_file(STATE, whole), lambda: torch.save(STATE, whole), lambda: saved_flat_legacy(whole)):
        write()
        data = whole.read_bytes()
        for size in {1, 7, 8, 9, 40, len(data) // 2, len(data) - 30, len(data) - 1}:
            cut = tmp_path / "cut.pth"
            cut.write_bytes(data[:size])
            with pytest.raises(UserError) as error:
                read(cut)
            sentence(error, "cut.pth")


def saved_flat_legacy(path: Path) -> None:
    torch.save(STATE, path, _use_new_zipfile_serialization=False)


@pickled
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([1, 2], "holds a list, not a dictionary"),
        (torch.ones(2), "holds a Tensor, not a dictionary"),
        ({}, "holds no tensors"),
        ({"model": {}, "epoch": 1}, "holds no tensors"),
        ({"model": {"a": 1.0}}, "holds no tensors"),
        ({1: torch.ones(1)}, "holds no tensors"),
        ({"a": torch.ones(1).expand(10**6, 10**6)}, "claims more weights than it holds bytes"),
    ],
)
def test_pickled_without_weights(tmp_path: Path, content: object, words: str) -> None:
    torch.save(content, tmp_path / "x.pth")
    with pytest.raises(UserError) as error:
        read(tmp_path / "x.pth")
    sentence(error, "x.pth", words)


@pickled
def test_dictionary_that_contains_itself(tmp_path: Path) -> None:
    loop: dict = {"epoch": 1}
    loop["model"] = loop
    torch.save(loop, tmp_path / "x.pth")
    with pytest.raises(UserError):
        read(tmp_path / "x.pth")


# ------------------------------------------------------------------------------------------- what a file is for


def test_identify(mar_fixtures: Path) -> None:
    for name in ("mar_b_keys", "tiny_mar_keys"):
        assert identify(json.loads((mar_fixtures / f"{name}.json").read_text())) == "mar"
    kl = json.loads((mar_fixtures / "kl16_keys.json").read_text())
    assert identify(kl) == "kl"
    assert identify({**kl, "quantize.embedding.weight": 0}) == "vq"
    assert identify(["tok_embeddings.weight", "cls_embedding.embedding_table.weight"]) == "llamagen"
    assert identify(["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"]) == "tar"
    assert identify(STATE) == "unknown"


# --------------------------------------------------------------------------------------------------- loading


def load(state: dict, net: nn.Module | None = None, **options) -> nn.Module:
    net = net or nn.ModuleDict({"a": nn.Linear(3, 2)})
    load_strictly(net, Checkpoint(state, {}, Path("some/x.safetensors")), "a layer", **options)
    return net


def test_loads_copies_in_the_dtype_asked_for() -> None:
    with torch.device("meta"):
        net = nn.ModuleDict({"a": nn.Linear(3, 2)})
    state = {k: v.clone() for k, v in STATE.items()}
    load(state, net, dtype=torch.float16, fp32=("a.bias",))
    assert net["a"].weight.dtype == torch.float16 and net["a"].bias.dtype == torch.float32
    assert torch.equal(net["a"].weight.float(), STATE["a.weight"])
    kept = load(state)
    state["a.weight"].zero_()
    assert torch.equal(kept["a"].weight, STATE["a.weight"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("a.bias"), "1 missing (a.bias)"),
        (lambda s: s.update(b=torch.ones(1)), "1 unexpected (b)"),
        (lambda s: s.update({"a.bias": torch.ones(3, 1)}), "1 misshaped (a.bias is 3x1, not 2)"),
        (lambda s: s.update({"a.bias": torch.tensor([1.0, float("nan")])}), "NaN or infinite weights in a.bias"),
        (lambda s: s.update({"a.bias": torch.tensor([1.0, float("-inf")])}), "NaN or infinite weights in a.bias"),
        (lambda s: s.update({"a.bias": torch.tensor([1, 2])}), "int64"),
        (lambda s: s.update({"a.bias": torch.ones(2).to_sparse()}), "no plain weights"),
    ],
    ids=["missing", "unexpected", "misshaped", "nan", "infinite", "integers", "sparse"],
)
def test_strict_and_never_half_loaded(change, words: str) -> None:
    net = nn.ModuleDict({"a": nn.Linear(3, 2)})
    before = {k: v.clone() for k, v in net.state_dict().items()}
    state = dict(STATE)
    change(state)
    with pytest.raises(UserError) as error:
        load(state, net)
    sentence(error, "checkpoint: x.safetensors", words, ";")
    assert same(net.state_dict(), before)


def test_three_names_of_a_kind() -> None:
    state = {f"extra{i}\n": torch.ones(1) for i in range(30)} | {"a.weight": torch.ones(1)}
    with pytest.raises(UserError) as error:
        load(state)
    text = sentence(error, "1 missing (a.bias)", "30 unexpected", "1 misshaped")
    assert len(re.findall(r"a\.bias|a\.weight|extra", text)) == 5
    with pytest.raises(UserError) as error:
        load({"x" * 100000: torch.ones(1), **STATE})
    assert len(sentence(error, "1 unexpected")) < 400


def test_weights_too_large_for_fp16() -> None:
    with pytest.raises(UserError) as error:
        load({**STATE, "a.bias": torch.tensor([1.0, 1e6])}, dtype=torch.float16)
    sentence(error, "too large for", "float16", "choose dtype bf16 or fp32")


def test_choose_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_dtype("auto", "cpu") == torch.float32
    assert choose_dtype("auto", "mps") == torch.float16
    assert choose_dtype("bf16", "cpu") == torch.bfloat16 and choose_dtype("fp32", "cuda") == torch.float32
    for capability, expected in (((6, 1), torch.float32), ((7, 5), torch.float16), ((9, 0), torch.float16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert choose_dtype("auto", "cuda:0") == expected
    with pytest.raises(UserError) as error:
        choose_dtype("float32", "cpu")
    assert choose_dtype("int8", "cpu") == torch.float32
    with pytest.raises(UserError, match="^dtype: int8"):
        choose_dtype("int8", "cuda:0")
    sentence(error, "dtype: 'float32'", "auto, fp32, bf16, fp16")
