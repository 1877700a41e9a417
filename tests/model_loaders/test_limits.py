"""Limits of the loaders at their last allowed and first refused value, and branches that few machines take."""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders import archive, checkpoint, folders
from fastar_nodes.model_loaders.checkpoint import Checkpoint, choose_dtype, load_strictly, read
from fastar_nodes.model_loaders.llamagen import load_llamagen
from fastar_nodes.model_loaders.mar import load_mar
from fastar_nodes.model_loaders.networks.llama import LlamaConfig
from fastar_nodes.model_loaders.networks.ops import Int8Linear
from fastar_nodes.model_loaders.tar import load_detokenizer, load_tar
from fastar_nodes.model_loaders.tokenizer import check_components, load_tokenizer
from safetensors.torch import save_file
from torch import nn


def stating(**metadata: str) -> Checkpoint:
    return Checkpoint({}, metadata, Path("x.safetensors"))


@pytest.mark.parametrize("kind, low, high", [(int, 1, 999), (float, 1e-4, 1e4)])
def test_metadata_numbers_at_the_bounds(kind, low, high):
    for value in (low, high):
        assert stating(t=str(value)).number("t", None, low, high, kind) == value
    for value in (low - kind(1), high + kind(1), "nan", "inf", "-inf", "x", ""):
        with pytest.raises(UserError, match=f"^checkpoint: .*t = .*from {low:g} to {high:g}"):
            stating(t=str(value)).number("t", None, low, high, kind)


def test_the_number_of_tensors(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    save_file({f"t{i}": torch.zeros(1) for i in range(5)}, path)
    monkeypatch.setattr(checkpoint, "_MAX_TENSORS", 5)
    assert len(read(path).state) == 5
    monkeypatch.setattr(checkpoint, "_MAX_TENSORS", 4)
    with pytest.raises(UserError, match="^checkpoint: x.safetensors holds 5 tensors, more than the limit of 4"):
        read(path)


def test_pickles_claim_at_most_twice_the_bytes_of_their_file(tmp_path):
    shared = torch.rand(10_000)
    path = tmp_path / "x.pt"
    torch.save({"a": shared, "b": shared[:9000]}, path)  # tied weights
    assert len(read(path).state) == 2
    torch.save({"a": shared, "b": shared, "c": shared}, path)
    with pytest.raises(UserError, match="claims more weights than it holds bytes"):
        read(path)


def test_pickles_are_checked_before_they_are_opened(tmp_path, monkeypatch):
    path = tmp_path / "x.pt"
    torch.save({"a": torch.zeros(1)}, path)
    read(path)

    def refuse(path: Path) -> None:
        raise checkpoint.archive.Refused("is odd")

    monkeypatch.setattr(checkpoint.archive, "check", refuse)
    monkeypatch.setattr(torch, "load", None)
    with pytest.raises(UserError, match="^checkpoint: x.pt is odd; "):
        read(path)


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_lack_of_memory_is_no_damage(tmp_path, monkeypatch, name):
    path = tmp_path / name
    (torch.save if name == "x.pt" else save_file)({"a": torch.zeros(1)}, path)

    def full(*args: object, **about: object) -> None:
        raise MemoryError

    monkeypatch.setattr(torch, "load", full)
    monkeypatch.setattr(checkpoint, "safe_open", full)
    with pytest.raises(MemoryError):
        read(path)


def test_bf16_only_where_the_device_computes_it(monkeypatch):
    for capability, expected in (((7, 9), torch.float16), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert choose_dtype("auto", "cuda", bf16=True) == expected
        assert choose_dtype("auto", "cuda", bf16=False) == torch.float16


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_in_fp8_are_read_and_checked(dtype):
    net = nn.ModuleDict({"a": nn.Linear(3, 2)})
    weight = torch.tensor([[1.0, 2.0, -4.0], [0.5, 0.25, 8.0]])
    state = {"a.weight": weight.to(dtype), "a.bias": torch.zeros(2).to(dtype)}
    load_strictly(net, Checkpoint(state, {}, Path("x.safetensors")), "a layer", dtype=torch.float32)
    assert torch.equal(net["a"].weight, weight)
    state["a.bias"] = torch.tensor([1.0, float("nan")]).to(dtype)
    with pytest.raises(UserError, match="NaN or infinite weights in a.bias"):
        load_strictly(net, Checkpoint(state, {}, Path("x.safetensors")), "a layer")


def test_the_length_of_a_header(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(1)}, path)
    length = int.from_bytes(path.read_bytes()[:8], "little")
    monkeypatch.setattr(checkpoint, "_HEADER_LIMIT", length)
    assert len(read(path).state) == 1
    monkeypatch.setattr(checkpoint, "_HEADER_LIMIT", length - 1)
    with pytest.raises(UserError, match="^checkpoint: x.safetensors is no weight file of a known format"):
        read(path)


def test_torch_refuses_code_by_itself(tmp_path, monkeypatch):
    """The check before torch reads a pickle is one of two."""
    monkeypatch.setattr(checkpoint.archive, "check", lambda path: None)

    class Payload:
        def __reduce__(self) -> tuple:
            return Path.mkdir, (tmp_path / "canary",)

    torch.save({"a": torch.zeros(1), "b": Payload()}, tmp_path / "x.pt")
    with pytest.raises(UserError, match="^checkpoint: x.pt "):
        read(tmp_path / "x.pt")
    assert not (tmp_path / "canary").exists()


def test_arguments_that_are_plain_are_kept(tmp_path):
    kept = {"none": None, "text": "x", "yes": True, "most": (1 << 63) - 1, "least": 1 - (1 << 63), "share": 0.5}
    left = {"large": 1 << 63, "inf": float("inf"), "nan": float("nan"), "list": [1], "deep": {"a": 1}, 3: 4}
    torch.save({"sd": {"a": torch.zeros(1), 7: torch.zeros(1), "b": 3}, "args": {**kept, **left}}, tmp_path / "x.pt")
    found = read(tmp_path / "x.pt")
    assert json.loads(found.metadata["args"]) == kept and [*found.state] == ["a"]


@pytest.mark.parametrize(("count", "ok"), [(5, True), (4, False)])
def test_the_number_of_records(tmp_path, monkeypatch, count, ok):
    """Of an archive: data.pkl, version, byteorder and so on."""
    path = tmp_path / "x.pt"
    torch.save({"a": torch.zeros(1)}, path)
    with zipfile.ZipFile(path) as file:
        held = len(file.infolist())
    monkeypatch.setattr(archive, "_MAX_RECORDS", held + count - 5)
    if ok:
        return archive.check(path)
    with pytest.raises(archive.Refused, match=f"has {held} records, more than the limit of {held - 1}"):
        archive.check(path)


def test_qwens_files_split_a_prompt_as_qwen_does(tmp_path):
    """Without a space in front, and by Qwen's pattern alone: it keeps a sign and the word behind it together."""
    pytest.importorskip("tokenizers")
    signs = [chr(n) for n in (*range(33, 127), *range(161, 173), *range(174, 256))]
    signs += [chr(256 + i) for i in range(256 - len(signs))]
    vocabulary = {sign: i for i, sign in enumerate(signs)} | {"(a": 300}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n( a\n")
    (tmp_path / "added_tokens.json").write_text('{"<|x|>": 301}')
    found = load_tokenizer(tmp_path, "", {})
    space = vocabulary["\u0120"]
    assert found.encode("(ab a") == [300, vocabulary["b"], space, vocabulary["a"]]
    assert found.special_tokens == {"<|x|>": 301} and found.size == 257
    assert len(found.encode("<|x|>")) == 5


def test_files_at_the_limit_of_a_tokenizer(tmp_path, monkeypatch):
    for name, content in (("vocab.json", '{"a": 0}'), ("merges.txt", "#version: 0.2\n"), ("added_tokens.json", "{}")):
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(folders, "MAX_JSON_BYTES", 14)
    pytest.importorskip("tokenizers")
    assert load_tokenizer(tmp_path, "", {}).size == 1
    monkeypatch.setattr(folders, "MAX_JSON_BYTES", 13)
    with pytest.raises(UserError, match="^checkpoint: merges.txt in .* cannot be read .it is too large"):
        load_tokenizer(tmp_path, "", {})


def test_only_token_models_take_bf16_by_themselves(monkeypatch, tmp_path):
    """A denoiser's first diffusion step multiplies rounding errors, see choose_dtype."""

    class Asked(Exception):
        pass

    asked = []

    def choose(name, device, bf16=False):
        asked.append(bf16)
        raise Asked

    monkeypatch.setattr(checkpoint, "choose_dtype", choose)
    for load, wanted in ((load_llamagen, True), (load_tar, True), (load_detokenizer, True), (load_mar, False)):
        with pytest.raises(Asked):
            load(tmp_path / "x.safetensors")
        assert asked.pop() is wanted, load.__name__


def test_loaded_networks_need_no_gradients(tmp_path):
    net = nn.Linear(2, 2)
    load_strictly(net, stating_weights(net), "a layer")
    assert not any(p.requires_grad for p in net.parameters()) and not net.training
    small = Int8Linear(torch.zeros(2, 2, dtype=torch.int8), torch.ones(2), torch.zeros(2))
    assert not any(p.requires_grad for p in small.parameters())


def stating_weights(net: nn.Module) -> Checkpoint:
    return Checkpoint({k: v.clone() for k, v in net.state_dict().items()}, {}, Path("x.safetensors"))


@pytest.mark.parametrize("rest", [-1, 0, 1])
def test_the_grid_of_a_detokenizer_with_official_positions(rest):
    """Positions of 729 condition rows and of the grid's tokens but one."""
    from fastar_nodes.model_loaders import tar

    for side in (2, 3, 16):
        rows = tar._OFFICIAL_PREFIX - 1 + side**2 + rest
        config = LlamaConfig(16, 1, 2, 2, 24, 24, "codes", 10, absolute=rows)
        if not rest:
            assert tar._grid(stating(), config, {}, None) == side
            continue
        with pytest.raises(UserError, match="does not say how large its pictures are"):
            tar._grid(stating(), config, {}, None)


@pytest.mark.parametrize(
    ("place", "given"),
    [
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "x" * 500_000}),
        ("normalizer", {"type": "Strip", "strip_left": True, "strip_right": True}),
        ("normalizer", {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "\u2581"}),
        ("normalizer", {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}),
        ("pre_tokenizer", {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": True}),
        ("pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": True}),
    ],
)
def test_official_components_are_accepted_with_their_arguments_only(place, given):
    parts = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}[place]

    def check(part: dict) -> None:
        check_components({"model": {"type": "Unigram", "byte_fallback": True}, place: part}, "x", "encoder")

    check(given)
    check({"type": "Sequence", parts: [given] * 8})
    wrong = [{**given, name: f"{value}x"} for name, value in given.items()]
    for other in (*wrong, {**given, "other": True}, {"type": "Sequence", parts: [given] * 9}, [given]):
        with pytest.raises(UserError, match=f"^encoder: x has a {place} that no official tokenizer has"):
            check(other)


# --------------------------------------------------------------------------------------------------- pickles


def pickled(path: Path, operations: bytes) -> Path:
    """A zip file in the layout of torch.save."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x/data.pkl", b"\x80\x02" + operations + b".")
    return path


@pytest.mark.parametrize(
    "operations",
    [
        b"K\x01Q",  # a storage that is described by no tuple: torch decides
        b"ctorch._utils\n_rebuild_tensor_v2\n)R",
        b"ccollections\nOrderedDict\n)R}X\x01\0\0\0aNsb",  # an attribute of a dictionary
        b"}(K\x01K\x02X\x01\0\0\0aNu",
        b"ctorch\nfloat32\n",
        b"ctorch\nSize\n(K\x01K\x02tR",
        b"](K\x01)\x85e",
    ],
)
def test_what_a_pickle_may_hold(tmp_path, operations):
    archive.check(pickled(tmp_path / "x.pt", operations))


@pytest.mark.parametrize(
    "operations",
    [
        b"cbuiltins\nlist\n",
        b"ctorch\nload\n",
        b"ctorch\nfloat32\n)R",
        b"K\x01)R",
        b"ccollections\nOrderedDict\n]\x85R",  # a copy
        b"ctorch._utils\n_rebuild_tensor_v2\n)R}b",  # the state of a tensor
        b"})Ns",  # a tuple as key
        b"}]Ns",
        b"}(NN)Nu",
        b"\x8f",
        b"0",
        b"s",
        b"h\x07",
        b"",
    ],
)
def test_what_a_pickle_may_not_hold(tmp_path, operations):
    path = pickled(tmp_path / "x.pt", operations if operations else b"\x80")
    with pytest.raises(archive.Refused):
        archive.check(path)


def test_work_of_a_pickle(tmp_path, monkeypatch):
    path = pickled(tmp_path / "x.pt", b"]NaNa")  # PROTO and STOP count, too
    monkeypatch.setattr(archive, "_MAX_WORK", 7)
    archive.check(path)
    monkeypatch.setattr(archive, "_MAX_WORK", 6)
    with pytest.raises(archive.Refused, match="more steps than the limit of 6"):
        archive.check(path)


def test_records_that_two_readers_may_take_for_another(tmp_path):
    """Names that differ by case only, two folders, and bytes behind the directory."""
    path = pickled(tmp_path / "x.pt", b"}")
    archive.check(path)
    for name in ("x/DATA.PKL", "y/data.pkl"):
        other = pickled(tmp_path / "y.pt", b"}")
        with zipfile.ZipFile(other, "a") as file:
            file.writestr(name, b"")
        with pytest.raises(archive.Refused):
            archive.check(other)
    data = path.read_bytes()
    path.write_bytes(data + b"\0")
    with pytest.raises(archive.Refused):
        archive.check(path)
    # The ends of a large file's directory, which states its own place.
    count, length, offset = struct.unpack("<HII", data[-12:-2])
    large = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, length, offset)
    for place, ok in ((len(data) - 22, True), (0, False)):
        end = large + struct.pack("<4sIQI", b"PK\x06\x07", 0, place, 1)
        path.write_bytes(data[:-22] + end + data[-22:])
        if ok:
            archive.check(path)
            continue
        with pytest.raises(archive.Refused):
            archive.check(path)
