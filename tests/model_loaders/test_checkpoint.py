"""Reading weight files: every nesting, and every hostile file
ends in one sentence and runs nothing; limits; strict loading.
"""

import argparse
import copy
import json
import os
import pickle
import re
import struct
import sys
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from attacks import hidden_pickle
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.files import archive, checkpoint, mapped
from fastar_nodes.model_loaders.files.checkpoint import Checkpoint, load_strictly, read, read_metadata
from fastar_nodes.model_loaders.files.tokenizer import load_tokenizer
from fastar_nodes.model_loaders.kinds import choose_bits, choose_dtype
from payload import Payload
from safetensors import safe_open
from safetensors.torch import _TYPES, save_file
from torch import nn

STATE = {"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.zeros(2)}


def refused(call: Callable[[], object], *words: str) -> str:
    """The message of the UserError, checked to be one line that holds every one of ``words``."""
    with pytest.raises(UserError) as error:
        call()
    text = str(error.value)
    assert "\n" not in text and len(text) <= 400 and all(word in text for word in words), text
    return text


def same(state: dict, expected: dict = STATE) -> bool:
    return state.keys() == expected.keys() and all(torch.equal(state[k], expected[k]) for k in state)


def test_safetensors_with_metadata_whatever_the_extension(tmp_path: Path) -> None:
    path = tmp_path / "weights.ckpt"
    save_file(STATE, path, metadata={"heads": "4", "name": "a small one"})
    file = read(str(path))
    assert same(file.state) and file.metadata == {"heads": "4", "name": "a small one"} and file.path == path
    assert read_metadata(path) == file.metadata


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: s,
        lambda s: {"model": s, "epoch": 3},
        lambda s: {"model": {"other": torch.ones(1)}, "model_ema": s, "args": argparse.Namespace(lr=1e-4, name="x")},
        lambda s: {"state_dict": {f"module.{k}": v for k, v in s.items()}},
        lambda s: {"state_dict": {"model": s}},
        lambda s: {"module": s},
        lambda s: {"module": {"module": s}},
        lambda s: {"model": {f"module.{k}": v for k, v in s.items()}},
        lambda s: {"model": {k: nn.Parameter(v) for k, v in s.items()}},
    ],
    ids=[
        "flat",
        "model",
        "ema preferred",
        "module prefix",
        "twice",
        "DeepSpeed",
        "DeepSpeed twice",
        "DDP",
        "parameters",
    ],
)
def test_pickled_nestings(tmp_path: Path, wrap) -> None:
    before = set(torch.serialization.get_safe_globals())
    torch.save(wrap(STATE), tmp_path / "weights.bin")
    file = read(tmp_path / "weights.bin")
    arguments = {"lr": 1e-4, "name": "x"} if "args" in wrap(STATE) else {}
    assert same(file.state) and file.arguments == arguments
    assert not any(t.requires_grad for t in file.state.values())
    assert set(torch.serialization.get_safe_globals()) == before


def test_prefix_stays_when_not_all_have_it(tmp_path: Path) -> None:
    save_file({"module.a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "x.safetensors")
    assert set(read(tmp_path / "x.safetensors").state) == {"module.a", "b"}


def saved(canary: Path, path: Path) -> None:
    torch.save({"model": STATE, "args": Payload(canary)}, path)


def saved_legacy(canary: Path, path: Path) -> None:
    torch.save({"model": STATE, "args": Payload(canary)}, path, _use_new_zipfile_serialization=False)


def bare(canary: Path, path: Path) -> None:
    path.write_bytes(pickle.dumps(Payload(canary), 2))


def zipped_by_hand(canary: Path, path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(Payload(canary), 2))
        file.writestr("archive/version", "3\n")


@pytest.mark.parametrize("write", [saved, saved_legacy, bare, zipped_by_hand])
@pytest.mark.parametrize("name", ["weights.pth", "weights.safetensors"])
def test_payload_is_refused_and_not_run(tmp_path: Path, write, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    canary, path = tmp_path / "canary", tmp_path / name
    write(canary, path)
    text = refused(lambda: read(path, "decoder"), f"decoder: {name} ")
    assert "mkdir" in text or write in (saved_legacy, bare) or name.endswith("safetensors")
    # The check before torch reads a pickle is one of two.
    monkeypatch.setattr(archive, "check", lambda path: None)
    refused(lambda: read(path))
    assert not canary.exists()
    pickle.loads(pickle.dumps(Payload(canary)))
    assert canary.is_dir()  # so the payload was live, and a careless reader would have run it


def test_pickles_are_checked_before_torch_opens_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise archive.Refused("is odd")

    torch.save(STATE, tmp_path / "x.pth")
    monkeypatch.setattr(torch, "load", None)
    monkeypatch.setattr(archive, "check", refuse)
    refused(lambda: read(tmp_path / "x.pth"), "checkpoint: x.pth is odd; ")
    monkeypatch.setattr(checkpoint, "_TORCH", (2, 5))
    refused(lambda: read(tmp_path / "x.pth"), "x.pth", "torch 2.6")


def test_what_is_no_file(tmp_path: Path) -> None:
    refused(lambda: read(tmp_path / "gone.safetensors"), "checkpoint: there is no file", "gone.safetensors")
    for name in (tmp_path / ("x" * 5000), "x\0y"):
        refused(lambda name=name: read(name))
    refused(lambda: read(tmp_path), "folder")
    if hasattr(os, "mkfifo"):  # is not waited for
        os.mkfifo(tmp_path / "x.safetensors")
        refused(lambda: read(tmp_path / "x.safetensors"), "a special file")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty (0 bytes)"),
        (b"Dear reader, these are not weights.\n", "is a text, not weights ('Dear reader, these are not weights.')"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "a Git LFS pointer"),
        (b"\n<!DOCTYPE html><html></html>", "a web page"),
        (b"GGUF\x03\x00\x00\x00\x00\x00", "a GGUF file"),
        (b"\x80\x04N.", "a pickle that torch.save did not write"),
        (b"\x00\x01", "cut short: it has 2 bytes"),
        (bytes(range(256)) * 4, "not a weight file"),
        (b"PK\x03\x04 and then nothing", "change the ending"),
        (b"PK\x03\x04"[:3], "cut short: it has 3 bytes"),
        ((2).to_bytes(8, "little") + b"{}", "holds no tensors"),
        ((900).to_bytes(8, "little") + b'{"a": ', "cut short"),
        ((8).to_bytes(8, "little") + b"{not it}", "damaged or cut short"),
        ((7).to_bytes(8, "little") + b"{" + b"[" * 6, "damaged or cut short"),
        ((2**62).to_bytes(8, "little") + b"{}", "not a weight file"),
    ],
)
def test_what_is_no_checkpoint(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "mar.safetensors"
    path.write_bytes(content)
    refused(lambda: read(path), "checkpoint: mar.safetensors", words, ";")
    assert read_metadata(path) == {}


def test_truncated_at_every_kind_of_place(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut.pth"
    for save in (save_file, torch.save, lambda s, p: torch.save(s, p, _use_new_zipfile_serialization=False)):
        save(STATE, whole)
        data = whole.read_bytes()
        for size in {1, 7, 8, 9, 40, len(data) // 2, len(data) - 30, len(data) - 1}:
            cut.write_bytes(data[:size])
            refused(lambda: read(cut), "cut.pth")


LOOP: dict = {"epoch": 1}
LOOP["model"] = LOOP


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([1, 2], "holds a list, not a dictionary"),
        (torch.ones(2), "holds a Tensor, not a dictionary"),
        ({}, "holds no tensors"),
        ({"model": {"a": 1.0}}, "holds no tensors"),
        ({1: torch.ones(1)}, "holds no tensors"),
        (LOOP, "holds no tensors"),
        ({"a": torch.ones(1).expand(10**6, 10**6)}, "has fewer bytes than the weights that it describes"),
    ],
)
def test_pickled_without_weights(tmp_path: Path, content: object, words: str) -> None:
    torch.save(content, tmp_path / "x.pth")
    refused(lambda: read(tmp_path / "x.pth"), "x.pth", words)


def test_pickles_claim_at_most_twice_the_bytes_of_their_file(tmp_path: Path) -> None:
    shared, path = torch.rand(10_000), tmp_path / "x.pt"
    torch.save({"a": shared, "b": shared[:9000]}, path)  # tied weights
    assert len(read(path).state) == 2
    torch.save({"a": shared, "b": shared, "c": shared}, path)
    refused(lambda: read(path), "the weights that it describes")


def test_arguments_that_are_plain_are_kept(tmp_path: Path) -> None:
    kept = {"none": None, "text": "x", "yes": True, "most": (1 << 63) - 1, "least": 1 - (1 << 63), "share": 0.5}
    left = {"large": 1 << 63, "inf": float("inf"), "nan": float("nan"), "list": [1], "deep": {"a": 1}, 3: 4}
    torch.save({"sd": {"a": torch.zeros(1), 7: torch.zeros(1), "b": 3}, "args": {**kept, **left}}, tmp_path / "x.pt")
    found = read(tmp_path / "x.pt")
    assert json.loads(found.metadata["args"]) == kept and [*found.state] == ["a"]


def test_the_length_of_a_header_and_its_number_of_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.safetensors"
    save_file({f"t{i}": torch.zeros(1) for i in range(5)}, path)
    length = int.from_bytes(path.read_bytes()[:8], "little")
    for limit, last in (("_MAX_TENSORS", 5), ("_HEADER_LIMIT", length)):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, limit, last)
            assert len(read(path).state) == 5
            patch.setattr(checkpoint, limit, last - 1)
            refused(lambda: read(path), "checkpoint: x.safetensors ")
            assert read_metadata(path) == {}


@pytest.mark.parametrize("low, high", [(1, 999), (1e-4, 1e4)])
def test_numbers_at_the_bounds(low: float, high: float) -> None:
    def number(value: object, settings: dict | None) -> float:
        metadata = {} if settings is not None else {"t": str(value)}
        return Checkpoint({}, metadata, Path("x")).number("t", 7, low, high, settings and {"t": value})

    for settings in (None, {"t": 0}):
        for value in (low, high):
            assert number(value, settings) == value
        for value in (low - type(low)(1), high + 1, float("nan"), float("inf"), "x", ""):
            refused(lambda value=value, settings=settings: number(value, settings), "checkpoint: ", f"from {low:g} to")
    assert number(None, {"t": 0}) == 7 and Checkpoint({}, {}, Path("x")).number("t", None, low, high) is None
    refused(lambda: number(True, {"t": 0}))


def test_files_at_the_limit_of_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    for name, content in (("vocab.json", '{"a": 0}'), ("merges.txt", "#version: 0.2\n"), ("added_tokens.json", "{}")):
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(checkpoint, "MAX_JSON_BYTES", 14)
    assert load_tokenizer(tmp_path, "", {}).size == 1
    monkeypatch.setattr(checkpoint, "MAX_JSON_BYTES", 13)
    refused(lambda: load_tokenizer(tmp_path, "", {}), "checkpoint: merges.txt in ", "too large")


def pickled(path: Path, operations: bytes) -> Path:
    """A zip file in the layout of torch.save."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x/data.pkl", b"\x80\x02" + operations + b".")
        file.writestr("x/version", "3\n")
    return path


@pytest.mark.parametrize(("limit", "last", "unit"), [("_MAX_STEPS", 7, "steps"), ("_MAX_PICKLE", 8, "bytes")])
def test_limits_of_a_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, last: int, unit: str) -> None:
    path = pickled(tmp_path / "x.pt", b"]NaNa")  # PROTO and STOP count, too
    monkeypatch.setattr(archive, limit, last)
    archive.check(path)
    monkeypatch.setattr(archive, limit, last - 1)
    refused(lambda: read(path), f"limit of {last - 1} {unit}; save only its weights")


LEAF = (0.9, 0.999)
ROW = torch.ones(1)


@pytest.mark.parametrize(
    ("value", "again"),
    [
        ([LEAF] * 1000, 0),  # the betas of an optimiser, which all groups of its parameters share
        (["text", torch.float32] * 1000, 0),
        ([(1, 2, 3, 4)] * 8, 7),
        ([(LEAF,)] * 8, 7),
        ([[]] * 8, 7),
        ([{}] * 8, 7),
        ([ROW] * 8, 7),
        ([OrderedDict()] * 8, 7),
        ([(LEAF, LEAF)], 0),
        ([((LEAF, LEAF), (LEAF, LEAF))], 0),
    ],
)
def test_what_is_named_again_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: object, again: int) -> None:
    """All values but texts, functions and up to three numbers; a copy or a hash of these takes no time."""
    torch.save(value, tmp_path / "x.pt")
    monkeypatch.setattr(archive, "_REPEATED", 1_000_000)
    monkeypatch.setattr(archive, "_MAX_STEPS", again * 1_000_000 + 900_000)
    archive.check(tmp_path / "x.pt")

    if again:
        monkeypatch.setattr(archive, "_MAX_STEPS", again * 1_000_000)
        with pytest.raises(archive.Refused, match="more than the limit"):
            archive.check(tmp_path / "x.pt")


@pytest.mark.parametrize(
    "operations",
    [
        b"}q\0" + b"h\0" * 20,
        b"X\x01\0\0\0aq\0}q\0" + b"h\0" * 20,  # the number of a text, given to a dictionary
        b"K\x01)\x86q\0" + b"h\0" * 20,
        b"K\x01]K\x02\x86q\0" + b"h\0" * 20,
        b"ccollections\nOrderedDict\n)Rq\0" + b"h\0" * 20,
        b"X\x01\0\0\0aq\0h\0q\1" + b"h\1" * 20,  # torch.save gives no value two numbers
    ],
)
def test_no_value_that_is_named_again_is_taken_for_a_small_one(tmp_path: Path, operations: bytes) -> None:
    with pytest.raises(archive.Refused, match="more than the limit"):
        archive.check(pickled(tmp_path / "x.pt", operations))


def test_a_training_s_file_is_far_from_the_limit(tmp_path: Path) -> None:
    """A thousand weights, averaged ones that share them, an optimiser with many groups, and its arguments."""
    net = nn.ModuleList(nn.Linear(2, 2) for _ in range(500))
    optimiser = torch.optim.AdamW([{"params": [p], "lr": 0.1} for p in net.parameters()])
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimiser.step()

    arguments = argparse.Namespace(lr=0.1, betas=(0.9, 0.95), dims=[1, 2])
    content = {"model": net.state_dict(), "model_ema": net.state_dict(), "optimizer": optimiser.state_dict()}
    torch.save({**content, "args": arguments}, tmp_path / "x.pt")
    assert len(read(tmp_path / "x.pt").state) == 1000


def test_deep_lists_and_dictionaries_are_no_danger(tmp_path: Path) -> None:
    """Neither torch's reader nor Python's release of values recurses into them, and they have no hash."""
    lists = pickled(tmp_path / "x.pt", b"}X\x01\0\0\0a" + b"]" * 150_000 + b"a" * 149_999 + b"s")
    refused(lambda: read(lists), "checkpoint: x.pt holds no tensors, only a")


def test_the_pickle_that_is_checked_is_the_one_that_torch_reads(tmp_path: Path) -> None:
    """A name of Info-ZIP's Unicode path field, which Python takes from 3.12 on and torch does not; a name twice."""
    code = pickle.dumps(Payload(tmp_path / "canary"), 2)
    refused(lambda: read(hidden_pickle(tmp_path / "x.pt", code)), "mkdir")

    first_or_last = []
    for order in ((code, b"\x80\x02}."), (b"\x80\x02}.", code)):
        with zipfile.ZipFile(tmp_path / "y.pt", "w") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for content in order:
                file.writestr("x/data.pkl", content)
            file.writestr("x/version", "3\n")
        first_or_last.append("mkdir" in refused(lambda: read(tmp_path / "y.pt")))

    assert sorted(first_or_last) == [False, True]
    assert not (tmp_path / "canary").exists()


def test_records_are_stored_as_they_are_and_once(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x/data.pkl", b"\x80\x02}.")
        file.writestr("x/data/0", bytes(999), zipfile.ZIP_DEFLATED)
    refused(lambda: read(path), "is a compressed archive, which torch never writes")

    with zipfile.ZipFile(pickled(path, b"}"), "a") as file:
        file.writestr("x/data/0", bytes(999))
        again = copy.copy(file.getinfo("x/data/0"))
        again.filename = "x/data/1"
        file.filelist.append(again)
        file._didModify = True  # so that the directory is written
    refused(lambda: read(path), "has fewer bytes than its list of contents states")


NO_ROOM = (
    OSError(12, "Cannot allocate memory"),
    RuntimeError("unable to mmap 29631230921 bytes from file <x>: Cannot allocate memory (12)"),
    OSError("[WinError 1455] The paging file is too small for this operation to complete"),
    RuntimeError("Couldn't open file mapping: <x>, error code: <1455>"),
)


@pytest.mark.parametrize("problem", NO_ROOM)
@pytest.mark.parametrize("name", ["large.safetensors", "large.pt"])
def test_a_file_that_memory_has_no_room_for_is_not_called_damaged(
    problem: Exception, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise problem

    path = tmp_path / name
    (torch.save if name.endswith(".pt") else save_file)({"a": torch.zeros(3)}, path)
    monkeypatch.setattr(torch, "load", fail)
    monkeypatch.setattr(mapped, "safe_open", fail)

    with pytest.raises(UserError) as caught:
        read(path)
    assert "this machine cannot map into its memory now" in str(caught.value)
    assert "page file" in str(caught.value) and "damaged" not in str(caught.value)


def test_every_dtype_of_safetensors_is_read_as_the_library_reads_it(tmp_path: Path) -> None:
    """Of the dtypes that this version of the library writes."""
    path = tmp_path / "x.safetensors"
    written = set(_TYPES.values())
    found = [getattr(torch, name) for name in mapped._DTYPES.values() if getattr(torch, name, None) in written]
    assert len(found) >= 14

    for dtype in found:
        bits = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) % 2
        numbers = bits.view(dtype).view(2, 3)
        save_file({"a": numbers, "one": numbers[1, 1].clone()}, path)

        with safe_open(path, framework="pt") as file:
            expected = {key: file.get_tensor(key) for key in file.keys()}
        for key, tensor in read(path).state.items():
            assert tensor.dtype is dtype and tensor.shape == expected[key].shape
            assert torch.equal(tensor.reshape(-1).view(torch.uint8), expected[key].reshape(-1).view(torch.uint8))


def test_a_dtype_that_torch_does_not_have_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.safetensors"
    save_file(STATE, path)
    monkeypatch.setattr(mapped, "_DTYPES", {"F32": "float3"})
    refused(
        lambda: read(path), "a dtype that this version of torch does not have (F32 in a.", "get the fp32, bf16 or fp16"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="NOT TESTED: /proc/self/maps is Linux's")
def test_a_safetensors_file_has_no_writable_mapping(tmp_path: Path) -> None:
    """Linux and Windows promise memory for all of a private mapping that can be written to."""
    path = tmp_path / "x.safetensors"
    save_file(STATE, path)
    kept = read(path)

    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    assert [line.split()[1] for line in lines] == ["r--s"]
    assert all(torch.equal(kept.state[name], tensor) for name, tensor in STATE.items())


@pytest.mark.skipif(sys.platform != "linux", reason="NOT TESTED: /proc/meminfo is Linux's")
def test_a_file_larger_than_memory_is_read(tmp_path: Path) -> None:
    sizes = dict(re.findall(r"(MemTotal|SwapTotal): +(\d+) kB", Path("/proc/meminfo").read_text()))
    rows = sum(map(int, sizes.values())) // 1024 + 1024  # of 1 MiB: 1 GiB more than there is
    large = rows << 20
    header = json.dumps(
        {
            "large": {"dtype": "U8", "shape": [rows, 1 << 20], "data_offsets": [0, large]},
            "small": {"dtype": "F32", "shape": [2], "data_offsets": [large, large + 8]},
        }
    ).encode()

    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.seek(large, os.SEEK_CUR)  # zeros that take no space
        file.write(struct.pack("<2f", 1.5, -2.0))

    state = read(path).state
    assert state["small"].tolist() == [1.5, -2.0]
    assert state["large"].shape == (rows, 1 << 20) and not state["large"][-1].any()


def load(state: dict, net: nn.Module | None = None, **options) -> nn.Module:
    net = net or nn.ModuleDict({"a": nn.Linear(3, 2)})
    return load_strictly(
        Checkpoint(dict(state), {}, Path("some/x.safetensors"), what="a layer"), lambda operations: net, **options
    )


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
    assert not kept.training and not any(p.requires_grad for p in kept.parameters())


def test_a_weight_with_two_names_is_converted_once() -> None:
    weight = torch.ones(2, 3)
    with torch.device("meta"):
        net = nn.ModuleDict({"a": nn.Linear(3, 2, bias=False), "b": nn.Linear(3, 2, bias=False)})

    loaded = load({"a.weight": weight, "b.weight": weight}, net, dtype=torch.bfloat16)
    assert loaded["a"].weight.data_ptr() == loaded["b"].weight.data_ptr() != weight.data_ptr()


def test_no_initial_weights_are_drawn() -> None:
    """They would be replaced, and drawing them on the device "meta" is slow."""
    before = torch.random.get_rng_state()

    def make(operations: object) -> nn.Module:
        torch.nn.Embedding(3, 2, device="cpu")
        torch.nn.Conv2d(1, 1, 1, device="cpu")
        return nn.ModuleDict({"a": nn.Linear(3, 2)})

    load_strictly(Checkpoint(dict(STATE), {}, Path("x.safetensors"), what="a layer"), make)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a.bias": None}, "1 weight missing (a.bias)"),
        ({"b": torch.ones(1)}, "1 weight unexpected (b)"),
        ({"a.bias": torch.ones(3, 1)}, "1 weight of a wrong shape (a.bias is 3x1, not 2)"),
        ({"a.bias": torch.tensor([1.0, float("nan")]).to(torch.float8_e5m2)}, "NaN or infinite weights in a.bias"),
        ({"a.bias": torch.ones(2).to_sparse()}, "instead of ordinary weights"),
        ({"a.bias": torch.tensor([1.0, 1e6])}, "too large for float16"),
    ],
    ids=["missing", "unexpected", "misshaped", "fp8", "sparse", "large"],
)
def test_strict_and_never_half_loaded(change: dict, words: str) -> None:
    net = nn.ModuleDict({"a": nn.Linear(3, 2)})
    before = {k: v.clone() for k, v in net.state_dict().items()}
    state = {k: v for k, v in {**STATE, **change}.items() if v is not None}
    refused(lambda: load(state, net, dtype=torch.float16), "checkpoint: x.safetensors", words, ";")
    assert same(net.state_dict(), before)


@pytest.mark.parametrize(
    ("capability", "plain", "bf16", "overflows"),
    [
        ((6, 1), torch.float32, torch.float32, torch.float32),
        ((7, 5), torch.float16, torch.float32, torch.float32),
        ((7, 9), torch.float16, torch.float32, torch.float32),
        ((8, 0), torch.float16, torch.bfloat16, torch.bfloat16),
        ((9, 0), torch.float16, torch.bfloat16, torch.bfloat16),
    ],
)
def test_auto_on_graphics_cards(monkeypatch: pytest.MonkeyPatch, capability, plain, bf16, overflows) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choose_dtype("auto", "cuda:0", "mar") == plain and choose_dtype("auto", "cuda", "tar") == bf16
    assert choose_dtype("auto", "cuda", "t5") == overflows
    assert choose_dtype("auto", "cuda", "vq") == torch.float32
    # LlamaGen's own program offers fp16 beside bf16; Tar's and Janus' do not.
    assert choose_dtype("auto", "cuda", "llamagen") == (torch.float16 if capability[0] == 7 else bf16)


def test_choose_dtype() -> None:
    assert choose_dtype("auto", "cpu", "tar") == choose_dtype("auto", "mps", "t5") == torch.float32
    assert choose_dtype("auto", "mps", "mar") == torch.float16 and choose_dtype("int8", "cpu", "mar") == torch.float32
    assert choose_dtype("bf16", "cpu", "mar") == torch.bfloat16 and choose_dtype("fp32", "cuda", "mar") == torch.float32
    for call in (
        lambda: choose_dtype("float32", "cpu", "mar"),
        lambda: choose_dtype("fp8", "mps", "mar"),
        lambda: choose_dtype("int8", "cpu", "vq"),
        lambda: choose_dtype("fp8", "cpu", "t5"),
        lambda: choose_dtype("fp16", "cpu", "hybrid"),
    ):
        refused(call, "dtype: ")


def test_8_bits_compute_in_the_familys_own_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    for name in ("int8", "fp8"):
        assert choose_dtype(name, "cuda", "mar") == torch.float16 and choose_bits(name, "cuda") == name
        assert choose_dtype(name, "cuda", "tar") == torch.bfloat16
        assert choose_dtype(name, "cpu", "janus") == torch.float32
    assert choose_bits("auto", "cuda") == choose_bits("auto", "cpu") == "auto"
    # A device without fp8 takes the numbers; int8 in a file stays if it is chosen.
    assert choose_bits("auto", "mps") == choose_bits("bf16", "cuda") == "" and choose_bits("int8", "mps") == "int8"
    refused(lambda: choose_dtype("fp8", "mps", "tar"), "dtype: fp8 is not supported on mps; choose int8")
    assert choose_dtype("int8", "mps", "llamagen") == torch.float16
    assert choose_dtype("int8", "mps", "tar") == torch.float32, "Tar was not checked in fp16"
