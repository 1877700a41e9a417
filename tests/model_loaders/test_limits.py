"""Limits of the loaders at their last allowed and first refused value, and branches that few machines take."""

from __future__ import annotations

import errno
import json
import os
import threading
import zipfile
from pathlib import Path

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders import archive, checkpoint, download, pins, text, tokenizer
from fastar_nodes.model_loaders.checkpoint import Checkpoint, choose_dtype, load_strictly, read
from fastar_nodes.model_loaders.llamagen import load_llamagen
from fastar_nodes.model_loaders.mar import load_mar
from fastar_nodes.model_loaders.networks.int8 import Int8Linear
from fastar_nodes.model_loaders.networks.llama import LlamaConfig
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
    monkeypatch.setattr(text, "MAX_JSON_BYTES", 2)
    with pytest.raises(UserError, match="the tokenizer in .* cannot be read"):
        text._tokenizer(None, tmp_path)
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


def test_the_length_of_a_header(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(1)}, path)
    length = int.from_bytes(path.read_bytes()[:8], "little")
    monkeypatch.setattr(checkpoint, "_HEADER_LIMIT", length)
    assert len(read(path).state) == 1
    monkeypatch.setattr(checkpoint, "_HEADER_LIMIT", length - 1)
    with pytest.raises(UserError, match="^checkpoint: x.safetensors is no weight file of a known format"):
        read(path)


def test_a_header_that_ends_with_the_file_and_one_that_does_not(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(0)}, path)
    data = path.read_bytes()
    assert len(data) == 8 + int.from_bytes(data[:8], "little")
    with pytest.raises(UserError, match="a tensor that is empty"):
        read(path)
    path.write_bytes(data[:-1])
    with pytest.raises(UserError, match="is cut short within its header"):
        read(path)


def test_torch_refuses_code_by_itself(tmp_path, monkeypatch):
    """The check before torch reads a pickle is one of two."""
    monkeypatch.setattr(checkpoint.archive, "check", lambda path: None)

    class Payload:
        def __reduce__(self) -> tuple:
            return Path.mkdir, (tmp_path / "canary",)

    torch.save({"a": torch.zeros(1), "b": Payload()}, tmp_path / "x.pt")
    with pytest.raises(UserError, match="holds more than numbers"):
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


@pytest.mark.parametrize(
    "given",
    [
        {"type": "Precompiled", "precompiled_charsmap": "x" * 500_000},
        {"type": "Strip", "strip_left": True, "strip_right": True},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "\u2581"},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
    ],
)
def test_official_normalizers_are_accepted_with_their_arguments_only(given):
    def check(normalizer: dict) -> None:
        spec = {"model": {"type": "Unigram", "byte_fallback": True}, "normalizer": normalizer}
        check_components(spec, text._COMPONENTS, "x", "encoder")

    check(given)
    check({"type": "Sequence", "normalizers": [given] * 8})
    for name, value in given.items():
        with pytest.raises(UserError, match="^encoder: x has a normalizer that no official tokenizer has"):
            check({**given, name: f"{value}x"})
    with pytest.raises(UserError, match="of another form"):
        check({"type": "Sequence", "normalizers": [given] * 9})
    with pytest.raises(UserError, match="has a normalizer that no official"):
        check({**given, "other": True})


@pytest.mark.parametrize("name", ["add_prefix_space", "split"])
@pytest.mark.parametrize("value", [True, False])
def test_official_pre_tokenizers(name, value):
    part = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", name: value}
    check_components({"model": {"type": "Unigram"}, "pre_tokenizer": part}, text._COMPONENTS, "x", "encoder")
    with pytest.raises(UserError, match="has a pre_tokenizer that"):
        check_components(
            {"model": {"type": "Unigram"}, "pre_tokenizer": {**part, name: 3}}, text._COMPONENTS, "x", "encoder"
        )


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
    assert found.marks == {"<|x|>": 301} and found.size == 257
    assert len(found.encode("<|x|>")) == 5


def test_files_at_the_limit_of_a_tokenizer(tmp_path, monkeypatch):
    for name, content in (("vocab.json", '{"a": 0}'), ("merges.txt", "#version: 0.2\n"), ("added_tokens.json", "{}")):
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(tokenizer, "MAX_JSON_BYTES", 14)
    pytest.importorskip("tokenizers")
    assert load_tokenizer(tmp_path, "", {}).size == 1
    monkeypatch.setattr(tokenizer, "MAX_JSON_BYTES", 13)
    with pytest.raises(UserError, match="^checkpoint: merges.txt in .* cannot be read .it is too large"):
        load_tokenizer(tmp_path, "", {})


def test_a_file_that_did_not_change_is_not_read_again(tmp_path, monkeypatch):
    path = tmp_path / "x.bin"
    path.write_bytes(b"x" * 100)
    pins.check(path, None, "checkpoint")  # nothing is recorded or pinned
    pins.record(path, pins.digests(path, lambda: None)[0])
    os.utime(path, (1000, 1000))
    read_again = []
    known = pins.digests
    monkeypatch.setattr(pins, "digests", lambda path, tick: read_again.append(path) or known(path, tick))
    pins.check(path, None, "checkpoint")
    assert not read_again
    written = path.with_name(path.name + ".sha256").stat().st_mtime_ns
    os.utime(path, ns=(written, written))  # within one tick of the clock
    pins.check(path, None, "checkpoint")
    assert not read_again
    later = written / 1e9 + 5
    os.utime(path, (later, later))
    pins.check(path, None, "checkpoint")
    assert read_again
    path.write_bytes(b"y" * 100)
    os.utime(path, (later + 5, later + 5))
    with pytest.raises(UserError, match="^checkpoint: x.bin has the sha256"):
        pins.check(path, None, "checkpoint")


@pytest.mark.parametrize(
    ("offered", "expected", "words"),
    [
        (50, 100, ""), (49, 100, "offers 49 bytes instead of about 100"), (None, 100, ""), (49, None, ""),
        (1 << 60, None, "the disk has"), (0, 100, ""),
    ],
)  # fmt: skip
def test_what_a_server_offers(tmp_path, monkeypatch, offered, expected, words):
    monkeypatch.setattr(download, "_MIN_SIZE_RATIO", 0.5)
    if not words:
        return download._check_offer(offered, expected, tmp_path / "x")
    with pytest.raises(download._Failed) as raised:
        download._check_offer(offered, expected, tmp_path / "x")
    assert words in str(raised.value.__cause__)


def test_the_part_that_is_there_counts(tmp_path, monkeypatch):
    part = tmp_path / "x"
    part.write_bytes(b"x" * 40)
    usage = type("Usage", (), {"free": 60})
    monkeypatch.setattr(download.shutil, "disk_usage", lambda folder: usage)
    download._check_offer(100, None, part)
    with pytest.raises(download._Failed):
        download._check_offer(101, None, part)


def test_parts_of_other_versions_are_deleted(tmp_path):
    def left(etag: str | None, size: int | None, own: int = 10) -> list[str]:
        for name, length in ((".x.aa.part", own), (".x.bb.part", 3), (".y.aa.part", 3)):
            (tmp_path / name).write_bytes(b"x" * length)
        part = download._part(tmp_path, "x", etag, size)
        assert part.name == (f".x.{etag.strip(chr(34))}.part" if etag else ".x.unknown.part")
        return sorted(p.name for p in tmp_path.iterdir())

    assert left('"aa"', 10) == left("aa", None) == [".x.aa.part", ".y.aa.part"]
    assert left("aa", 9) == left(None, 10) == [".y.aa.part"]  # longer than the file, or of no known version


def test_a_download_does_not_keep_the_process_alive():
    assert download._run_in_thread(lambda: threading.current_thread().daemon, lambda: None)


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


def test_which_tokenizers_need_no_library():
    words = {"model": {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}}
    words |= {"normalizer": {"type": "Lowercase"}, "pre_tokenizer": {"type": "Whitespace"}}
    assert tokenizer._is_word_level(words) and tokenizer._is_word_level({**words, "normalizer": None})
    for other in (
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"pre_tokenizer": None},
        {"model": {**words["model"], "type": "BPE"}},
        {"model": {**words["model"], "unk_token": "x"}},
    ):
        assert not tokenizer._is_word_level({**words, **other})


def test_short_texts_and_long_numbers_of_a_pickle():
    """Texts of Python 2, and storages of 2^31 elements and more."""

    def elements(count: bytes, held: int) -> int:
        pickled = b"\x80\x02(U\x07storagectorch\nFloatStorage\nU\x010U\x03cpu" + count + b"tQ."
        machine = archive._Machine(pickled, {"0": held}, 100)
        machine.run()
        return machine.stack[-1].value

    assert elements(b"K\x04", 16) == elements(b"\x8a\x01\x04", 16) == 4
    assert elements(b"\x8a\x05" + (1 << 32).to_bytes(5, "little"), 1 << 34) == 1 << 32
    for count, held in ((b"\x8a\x01\x04", 15), (b"\x8a\x01\xfc", 1 << 34)):  # one byte too few, and a negative number
        with pytest.raises(archive.Refused, match="claims more weights"):
            elements(count, held)


@pytest.mark.parametrize("value", [b"K\x01", b"N", b"]", b"}", b")", b"ctorch\nFloatStorage\n"])
def test_calls_and_storages_of_what_is_no_tuple(value):
    def run(pickled: bytes) -> None:
        archive._Machine(b"\x80\x02" + pickled + b".", {}, 100).run()

    with pytest.raises(archive.Refused, match="a storage in it is misdescribed"):
        run(value + b"Q")
    with pytest.raises(archive.Refused, match="a tensor in it is misshaped"):
        run(b"ctorch._utils\n_rebuild_tensor_v2\n" + value + b"R")
    run(b"ccollections\nOrderedDict\n" + value + b"R")  # torch decides
    with pytest.raises(archive.HoldsCode):
        run(value + b"K\x01R")
