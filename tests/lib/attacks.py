"""Small hostile files. Each attack writes one into a folder and
returns its path; its docstring or comment states what it tries.

Attacks that are no files are in other tests: on widgets and sockets in ``tests/nodes/test_hostile_values.py``, on a
server in ``tests/comfyui/test_load.py``, on the command line in ``tests/cli/test_hostile_options.py``, on downloads in
``tests/model_loaders/test_download.py``, elongated pictures in ``tests/reports/test_grid.py``, lack of memory in
``tests/samplers/test_batches.py`` and ``tests/nodes/test_node_memory.py``.
"""

import base64
import copy
import io
import json
import pickle
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import tar_files
import torch
from payload import Payload
from safetensors import safe_open
from safetensors.torch import load_file, save_file

# Beginning of the format that torch.save wrote before version 1.6.
LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
# Opcodes of a dictionary whose first key is "a".
NAMED_A = b"\x80\x02}X\x01\0\0\0a"
# Attack, the loader that reads it, and a word of the refusal.
ATTACKS: list[tuple[Callable[[Path], Path], str, str]] = []


def registered(name: str, loader: str, words: str, make: Callable[[Path], Path]) -> Callable[[Path], Path]:
    """Register an attack on a loader: the stem of a file of ``seeds.py``, "tar" for a folder."""
    make.__name__ = name
    ATTACKS.append((make, loader, words))
    return make


def attack(loader: str, words: str) -> Callable[[Callable[[Path], Path]], Callable[[Path], Path]]:
    """Register a function as an attack under its name."""
    return lambda make: registered(make.__name__, loader, words, make)


def archive_with(path: Path, pickled: bytes, compression: int = zipfile.ZIP_STORED, **records: bytes) -> Path:
    """A zip file in the layout of torch.save."""
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/version", "3\n")
        for name, content in records.items():
            file.writestr(f"archive/data/{name}", content)
    return path


def header(path: Path, entries: dict[str, Any], body: bytes = b"", text: str = "") -> Path:
    """A safetensors file with this header."""
    data = (text or json.dumps(entries)).encode()
    path.write_bytes(len(data).to_bytes(8, "little") + data + body)
    return path


def storage(key: str, count: int) -> bytes:
    """Opcodes that push a float storage of ``count`` elements."""
    size = count.to_bytes(4, "little")
    return b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0" + key.encode() + b"X\x03\0\0\0cpuJ" + size + b"tQ"


def tensor(key: str, count: int, shape: int) -> bytes:
    """Opcodes that push a tensor over such a storage."""
    size = shape.to_bytes(4, "little")
    over = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage(key, count) + b"K\0J" + size
    return over + b"\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR"


def renamed(name: str, path: str) -> zipfile.ZipInfo:
    """A zip record ``name`` with a Unicode path field of Info-ZIP,
    which is its name for Python from 3.12 on, and not for torch.
    """
    record, other = zipfile.ZipInfo(name), path.encode()
    field = struct.pack("<BI", 1, zlib.crc32(name.encode())) + other
    record.extra = struct.pack("<HH", 0x7075, len(field)) + field
    return record


def hidden_pickle(path: Path, pickled: bytes) -> Path:
    """A zip file whose data.pkl is ``pickled`` for torch, and a harmless one for Python from 3.12 on."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(renamed("archive/data.pkl", "archive/other"), pickled)
        file.writestr(renamed("archive/other", "archive/data.pkl"), b"\x80\x02}.")
        file.writestr("archive/version", "3\n")
    return path


# What a hidden pickle holds: 268 MB for 800 bytes, tuples whose deletion overflows the stack, and code.
for _name, _words, _body in (
    ("hidden_megabytes", "no tensors", b"\x80\x02}X\x01\0\0\0acbuiltins\nbytearray\nJ\0\0\0\x10\x85Rs."),
    ("hidden_tuples", "more than the limit", b"\x80\x02}X\x01\0\0\0a)" + b"\x85" * 1_000_000 + b"s."),
):
    registered(_name, "mar", _words, lambda f, body=_body: hidden_pickle(f / "x.pt", body))
registered(
    "hidden_code",
    "mar",
    "mkdir",
    lambda f: hidden_pickle(f / "x.pt", pickle.dumps(Payload(f / "canary"), 2)),
)


@attack("mar", "compressed archive")
def zip_bomb(folder: Path) -> Path:
    """100 MB of zeros in 100 kB: a compressed record, which torch would inflate into memory."""
    return archive_with(folder / "x.pt", b"\x80\x02}.", zipfile.ZIP_DEFLATED, **{"0": bytes(100_000_000)})


def numbered(count: int) -> bytes:
    """Opcodes that push a dictionary key and its value, ``count`` times."""
    return b"".join(b"J" + i.to_bytes(4, "little") + b"N" for i in range(count))


# Name, a word of the refusal, and the opcodes behind the protocol's number.
PICKLES = (
    # 100 bytes that allocate 268 MB: bytearray(n), which torch's weights-only unpickler calls.
    ("bytearray_of_megabytes", "no tensors", b"}X\x01\0\0\0acbuiltins\nbytearray\nJ\0\0\0\x10\x85Rs."),
    # torch.Tensor(n) allocates 8 GB, by its class instead of a storage.
    ("tensor_of_gigabytes", "into its memory now", b"}X\x01\0\0\0actorch\nTensor\nJ\0\0\0\x7f\x85Rs."),
    # Thirty times _codecs.encode(x, "hex"): each doubles the length, to gigabytes.
    (
        "doubling_codec",
        "more than the limit",
        b"}X\x01\0\0\0a(U\x08xxxxxxxxq\0" + b"c_codecs\nencode\nh\0X\x03\0\0\0hex\x86Rq\0" * 30 + b"ts.",
    ),
    # A dictionary key of forty tuples, each holding the previous twice: its hash takes 2^40 steps.
    ("hash_of_doubled_tuples", "more than the limit", b")q\0" + b"h\0h\0\x86q\0" * 40 + b"}h\0Ns."),
    # A hundred thousand nested tuples as a key, whose hash overflows the stack of the process.
    ("deep_tuples", "no tensors", b"})" + b"\x85" * 100_000 + b"Ns."),
    # Nested values, whose release or printing could overflow the stack of the process.
    ("deep_tuples_as_a_value", "no tensors", b"}X\x01\0\0\0a)" + b"\x85" * 300_000 + b"s."),
    ("deep_lists", "no tensors", b"}X\x01\0\0\0a" + b"]" * 100_000 + b"a" * 99_999 + b"s."),
    # A list that is filled after it was put into another, so that no part of the pickle is deep.
    ("deep_by_reference", "Unsupported operand", b"]q\0]q\1h\0h\1a0."),
    ("five_million_open_marks", "more than the limit", b"(" * 5_000_000 + b"."),
    # 216 bytes each, in 10 MB.
    ("ten_million_empty_sets", "more than the limit", b"\x8f" * 10_000_000 + b"."),
    # OrderedDict(x) of a dictionary with 20,000 entries, 5,000 times.
    (
        "copies_of_a_dictionary",
        "more than the limit",
        b"}q\0(" + numbered(20_000) + b"u](" + b"ccollections\nOrderedDict\nh\0\x85R" * 5_000 + b"e.",
    ),
)


for _name, _words, _body in PICKLES:
    registered(_name, "mar", _words, lambda f, body=_body: archive_with(f / "x.pt", b"\x80\x02" + body))


# A storage of 2^31 elements whose record has four bytes; a tensor of
# 2^31 elements over a storage of one, which torch enlarges to fit.
for _name, _words, _sizes in (
    ("storage_larger_than_its_record", "does not hold a MAR", (2**31 - 1, 1)),
    ("tensor_larger_than_its_storage", "damaged", (1, 2**31 - 1)),
):
    _body = NAMED_A + tensor("0", *_sizes) + b"s."
    registered(_name, "mar", _words, lambda f, body=_body: archive_with(f / "x.pt", body, **{"0": bytes(4)}))


def legacy(folder: Path, state: bytes, tail: bytes = b"") -> Path:
    """A file of the old format: version, system, opcodes of the weights, keys of their storages, and the storages."""
    parts = (b"\x80\x02M\xe9\x03.", pickle.dumps({"little_endian": True}, 2), state, pickle.dumps(["0"], 2), tail)
    (folder / "x.pth").write_bytes(LEGACY + b"".join(parts))
    return folder / "x.pth"


@attack("mar", "before 2020")
def legacy_storage_of_gigabytes(folder: Path) -> Path:
    """The old format allocates a storage before it reads it: 8 GB for 200 bytes."""
    return legacy(folder, NAMED_A + tensor("0", 2**31 - 1, 2**31 - 1) + b"s.")


@attack("mar", "before 2020")
def legacy_storage_that_grows(folder: Path) -> Path:
    """A storage first of one element, then under the same key of 2^31: torch takes the first, and enlarges it."""
    first, second = tensor("0", 1, 1), tensor("0", 2**31 - 1, 2**31 - 1)
    state = b"\x80\x02}(X\x01\0\0\0a" + first + b"X\x01\0\0\0b" + second + b"u."
    return legacy(folder, state, (1).to_bytes(8, "little") + bytes(4))


@attack("mar", "the weights that it describes")
def expanded_tensor(folder: Path) -> Path:
    """Strides of zero: one element as a terabyte."""
    torch.save({"a": torch.ones(1).expand(10**6, 10**6)}, folder / "x.pt")
    return folder / "x.pt"


def code(path: Path, zipped: bool) -> Path:
    """A pickle that calls os.mkdir, beside valid weights."""
    state = {"model": {"a": torch.ones(1)}, "args": Payload(path.parent / "canary")}
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    return path


registered("code_in_a_zip", "mar", "mkdir", lambda f: code(f / "x.pt", True))
# In the format before zip, under the extension of safetensors.
registered("code_in_the_old_format", "mar", "before 2020", lambda f: code(f / "x.safetensors", False))


@attack("mar", "has fewer bytes than its list of contents states")
def overlapping_records(folder: Path) -> Path:
    """A thousand records that all lie on the same 100 kB: 100 MB when they are read."""
    path = archive_with(folder / "x.pt", b"\x80\x02}.", **{"0": bytes(100_000)})
    with zipfile.ZipFile(path, "a") as file:
        for i in range(1, 1000):
            again = copy.copy(file.getinfo("archive/data/0"))
            again.filename = f"archive/data/{i}"
            file.filelist.append(again)
        file._didModify = True  # type: ignore[attr-defined] - so that the directory is written
    return path


@attack("mar", "compressed archive")
def two_directories(folder: Path) -> Path:
    """A second zip directory behind the first, so that two readers see different records."""
    path = archive_with(folder / "x.pt", b"\x80\x02}.")
    other = io.BytesIO()
    with zipfile.ZipFile(other, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", bytes(10**6))
    path.write_bytes(path.read_bytes() + other.getvalue())
    return path


@attack("mar", "mkdir")
def record_named_twice(folder: Path) -> Path:
    """Two records of one name, of which one reader takes the first and another the last: harmless
    weights, then code.
    """
    path = folder / "x.pt"
    with zipfile.ZipFile(path, "w") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file.writestr("archive/data.pkl", b"\x80\x02}.")
        file.writestr("archive/version", "3\n")
        file.writestr("archive/data.pkl", pickle.dumps(Payload(folder / "canary"), 2))
    return path


@attack("mar", "empty or too large")
def blocks_of_nothing(folder: Path) -> Path:
    """20,000 empty tensors named like the blocks of a MAR; building that many blocks takes a minute."""
    nothing = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    return header(folder / "x.safetensors", {f"encoder_blocks.{i}.x": nothing for i in range(20_000)})


def resaved(path: Path, source: Path, **tensors: torch.Tensor) -> Path:
    """A valid file with tensors added or replaced."""
    with safe_open(source, "pt") as file:
        metadata = file.metadata()
    save_file(load_file(source) | tensors, path, metadata=metadata)
    return path


def small_blocks(path: Path, source: Path, name: str, numbers: range) -> Path:
    """A valid file with further tensors of one number, named like blocks."""
    return resaved(path, source, **{name.format(i): torch.ones(1) for i in numbers})


def crafted(loader: str, make: Callable[[Path, Path], Path], name: str, words: str) -> None:
    """Register an attack that changes the valid file of a loader."""

    def attacking(folder: Path) -> Path:
        return make(folder / "x.safetensors", folder / "seeds" / f"{loader}.safetensors")

    registered(f"{name}_of_{loader}", loader, words, attacking)


# 20,000 tensors of one number, each of which would become a block of the network.
for _loader, _name in (
    ("mar", "encoder_blocks.{}.x"),
    ("gpt", "layers.{}.x"),
    ("kl", "encoder.down.{}.block.0.conv1.weight"),
    ("vq", "encoder.conv_blocks.0.res.{}.conv1.weight"),
    ("ta_tok", "encoder.encoder.layers.{}.x"),
    ("dtok", "layers.{}.x"),
    ("hybrid", "llm.model.layers.{}.x"),
):
    _make = partial(small_blocks, name=_name, numbers=range(3, 20_000))
    crafted(_loader, _make, "many_blocks", "block")


# The shape [2^60, 0], and no bytes.
for _loader, _name in (
    ("mar", "mask_token"),
    ("gpt", "layers.0.attention.wqkv.weight"),
    ("vq", "decoder.conv_blocks.0.attn.0.k.weight"),
    ("ta_tok", "bottleneck.in_linear.weight"),
    ("dtok", "abs_pe"),
    ("hybrid", "mar.mask_token"),
):
    _make = partial(resaved, **{_name: torch.zeros(2**60, 0)})
    crafted(_loader, _make, "huge_axis", "empty or too large")


@attack("mar", "damaged")
def bytes_that_contradict_the_shape(folder: Path) -> Path:
    """A tensor of 2^40 elements over the bytes of a few."""
    data = (folder / "seeds" / "mar.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    entries["mask_token"]["shape"] = [2**20, 2**20]
    return header(folder / "x.safetensors", entries, data[8 + length :])


@attack("mar", "does not fit a MAR: 3 weights unexpected")
def names_of_100_kilobytes(folder: Path) -> Path:
    """Unknown tensors with long names, line breaks and control characters, which a message would repeat."""
    names = [f"{i}\n\x1b[2J" + "x" * 100_000 for i in range(3)]
    source = folder / "seeds" / "mar.safetensors"
    return resaved(folder / "x.safetensors", source, **{name: torch.ones(1) for name in names})


@attack("mar", "not numbered 0 to")
def blocks_with_words(folder: Path) -> Path:
    """Blocks that are numbered by words, which a count of distinct names accepts."""
    source = folder / "seeds" / "mar.safetensors"
    return small_blocks(folder / "x.safetensors", source, "encoder_blocks.x{}.y", range(400))


@attack("kl", "empty or too large")
def axes_of_2_to_60(folder: Path) -> Path:
    """An axis of 2^60 beside one of 0: no bytes, and an overflow where sizes are multiplied."""
    entry = {"dtype": "F32", "shape": [2**60, 0], "data_offsets": [0, 0]}
    names = ("encoder.conv_in.weight", "post_quant_conv.weight", "decoder.conv_in.weight")
    return header(folder / "x.safetensors", dict.fromkeys(names, entry))


@attack("mar", "more than the limit of 100000")
def million_tensors(folder: Path) -> Path:
    """120,000 tensors in 8 MB of header, each of which becomes an object."""
    entry = {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}
    return header(folder / "x.safetensors", {str(i): entry for i in range(120_000)}, bytes(4))


@attack("mar", "has a header of 90.0 MB")
def header_of_90_megabytes(folder: Path) -> Path:
    """A header of 90 MB, several times that when parsed."""
    return header(folder / "x.safetensors", {}, text='{"__metadata__": {"name": "' + "x" * 90_000_000 + '"}}')


def tar(folder: Path, **files: str) -> Path:
    """Tar's model folder with these files replaced; "__" stands for a dot."""
    path = tar_files.language_model(folder / "tar")
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


def config(**changes: str) -> str:
    """Tar's config.json with values replaced by raw JSON."""
    text = {k: json.dumps(v) for k, v in {**tar_files.CONFIG, **tar_files.IDS}.items()} | changes
    return "{" + ", ".join(f'"{k}": {v}' for k, v in text.items()) + "}"


def tokens(**changes: Any) -> str:
    """Tar's tokenizer.json with parts replaced."""
    return json.dumps(tar_files.words(**changes))


# Name, a word of the refusal, and the files that are replaced.
FOLDERS = (
    # It overflows a float when it is compared with its limits.
    ("integer_of_400_digits", "rope_theta = 999", {"config__json": config(rope_theta="9" * 400)}),
    # Python's JSON parser accepts it, and no comparison with an upper limit of a float refuses it as a type.
    ("infinity_in_the_configuration", "rms_norm_eps = Infinity", {"config__json": config(rms_norm_eps="Infinity")}),
    ("nan_as_a_token_id", "is not a tokenizer", {"tokenizer__json": tokens().replace('"red": 2', '"red": NaN')}),
    # It reads another row of the embedding.
    (
        "negative_token_id",
        "-15 is not a token id",
        {
            "config__json": json.dumps(tar_files.CONFIG),
            "tokenizer__json": tokens(added={**tar_files.ADDED, "<im_start>": -15}),
        },
    ),
    # A hundred thousand nested lists, which overflow the stack of a recursive parser.
    ("deep_json", "config.json", {"config__json": "[" * 100_000}),
    # As deep as a parser reads, so that what prints or compares the values overflows its stack.
    ("deep_value", "rope_theta = a list", {"config__json": config(rope_theta="[" * 900 + "]" * 900)}),
)
for _name, _words, _files in FOLDERS:
    registered(_name, "tar", _words, lambda f, files=_files: tar(f, **files))


def charsmap(stated: int, trie: int) -> dict[str, Any]:
    """SentencePiece's table that states a trie of so many bytes and holds one of ``trie`` bytes."""
    table = stated.to_bytes(4, "little") + bytes(trie)
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


def t5(folder: Path, normalizer: dict[str, Any]) -> Path:
    """A text encoder with this normalizer."""
    file = folder / "seeds" / "t5" / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "normalizer": normalizer}))
    return file.parent


for _name, _words, _part in (
    # Tables on which the library tokenizers panics, not with an
    # Exception but a BaseException: when it is read, or at a prompt.
    ("panic_while_reading", "is not a tokenizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    ("panic_while_encoding", "cannot encode the prompt", charsmap(4, 4)),
):
    registered(_name, "t5", _words, lambda f, part=_part: t5(f, part))


@attack("t5", "too large")
def tokenizer_beyond_the_limit(folder: Path) -> Path:
    """A sparse tokenizer.json of a terabyte."""
    path = folder / "seeds" / "t5"
    with (path / "tokenizer.json").open("r+b") as file:
        file.truncate(1 << 40)
    return path


@attack("tar", "a broken link")
def loop_of_links(folder: Path) -> Path:
    """Shards that are links to each other."""
    path = tar(folder)
    (path / "model.safetensors").unlink()
    for here, there in ((1, 2), (2, 1)):
        (path / f"model-0000{here}-of-00002.safetensors").symlink_to(path / f"model-0000{there}-of-00002.safetensors")
    return path


@attack("tar", "link to a file outside this folder")
def link_to_a_secret(folder: Path) -> Path:
    """A config.json that is a link to a file outside the folder."""
    path = tar(folder)
    (folder / "secret.json").write_text("{}")
    (path / "config.json").unlink()
    (path / "config.json").symlink_to(folder / "secret.json")
    return path
