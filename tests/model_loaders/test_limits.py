"""Limits of the loaders at their last allowed and first refused value, and branches that few machines take."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders import checkpoint, download, text
from fastar_nodes.model_loaders.checkpoint import Checkpoint, choose_dtype, load_strictly, read
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
    monkeypatch.setattr(checkpoint, "safe_open", None)  # refused from the header alone
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


def test_a_tokenizer_that_is_too_large(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(text, "MAX_JSON_BYTES", 1)
    with pytest.raises(UserError, match="tokenizer.json in .* is too large; get the file again"):
        text._tokenizer(None, tmp_path)


def test_why_a_download_failed():
    class ConnectTimeout(Exception):
        pass

    class ReadTimeout(Exception):
        pass

    class Answer(Exception):
        def __init__(self, status: int):
            self.response = type("Response", (), {"status_code": status})

    mirror = "no connection, HF_ENDPOINT may name a mirror: it broke"

    class ConnectError(Exception):
        pass

    reasons = {
        ConnectError("it broke."): mirror,
        ReadTimeout("it broke."): mirror,
        ValueError("it broke."): "it broke",
        Answer(401): "the server refused with status 401; a token in HF_TOKEN may help",
        Answer(403): "the server refused with status 403; a token in HF_TOKEN may help",
        Answer(404): "the server answered with status 404",
        OSError(errno.ENOSPC, "x"): "the disk is full",
    }
    for error, reason in reasons.items():
        assert download._reason(error) == reason


@pytest.mark.parametrize("size, ok", [(3, True), (4, False), (None, True)])
def test_a_part_of_another_length_is_deleted(tmp_path, size, ok):
    part = tmp_path / ".x.part"
    part.write_bytes(b"abc")
    if ok:
        assert len(download._check_part(part, size, None, None, None, lambda *a: None)) == 64
    else:
        with pytest.raises(download._Failed):
            download._check_part(part, size, None, None, None, lambda *a: None)
    assert part.exists() is ok


@pytest.mark.parametrize("which", ["pinned", "first", "etag"])
def test_a_part_with_another_digest_is_deleted(tmp_path, which):
    part, wrong = tmp_path / ".x.part", "0" * 64
    part.write_bytes(b"abc")
    values = {"etag": None, "pinned": None, "first": None, which: wrong}
    with pytest.raises(download._Failed):
        download._check_part(part, 3, values["etag"], values["pinned"], values["first"], lambda *a: None)
    assert not part.exists()


def test_an_optional_part_is_skipped_only_if_it_does_not_exist(tmp_path, monkeypatch):
    from fastar_nodes.model_loaders import hub

    entry = hub.Entry("x", "t5", "x", "a/b", None, 100, None, "MIT", None, parts=("one", "two?"))
    seen: list[tuple[int, int]] = []

    def fetch(answer: str):
        def download(repo: str, part: str, to: Path, progress=None, **about: object) -> Path:
            if part == "two":
                raise UserError(f"encoder: the server answered with status {answer}")
            to.mkdir(exist_ok=True)
            (to / part).write_bytes(b"12345")
            progress(5, 5)
            return to / part

        return download

    monkeypatch.setattr(hub, "download", fetch("404"))
    path = hub._resolve_parts(entry, [], tmp_path, lambda done, total: seen.append((done, total)), "encoder")
    assert path == tmp_path / "x" and seen == [(5, 100)]
    (path / "one").unlink()
    monkeypatch.setattr(hub, "download", fetch("500"))
    with pytest.raises(UserError, match="status 500"):
        hub._resolve_parts(entry, [], tmp_path, lambda *a: None, "encoder")
    # What is there counts towards the folder's progress.
    (path / "one").write_bytes(b"12345")
    seen.clear()

    def second(repo: str, part: str, to: Path, progress=None, **about: object) -> Path:
        progress(2, 3)
        (to / part).write_bytes(b"123")
        return to / part

    monkeypatch.setattr(hub, "download", second)
    hub._resolve_parts(entry, [], tmp_path, lambda done, total: seen.append((done, total)), "encoder")
    assert seen == [(7, 100)]
