"""Random and structural mutations of weight files and model folders."""

import io
import json
import random
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from payload import Payload

NUMBERS = (0, 1, -1, 2, 3, 7, 255, 513, 20_000, 2**31 - 1, 2**31, 2**53, 2**60, 2**63, 2**64, -(2**63), 10**24, 10**399)
TEXTS = ("", "0", "-1", "nan", "inf", "1e400", "9" * 400, "x" * 5000, "\0", "../../x", "\ud800", "ümläut", "[" * 2000)
# Keys that some loader reads from a file's metadata.
KEYS = ("heads", "patch", "t_max", "latent_scale", "grid", "groups", "name", "label_set", "config", "args", "tokenizer",
        "encoder_heads", "decoder_heads", "input_size", "format", "decoder", "num_classes", "defaults")  # fmt: skip
EVIL_PARTS: tuple[dict[str, Any], ...] = (
    {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000},
    {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"Regex": ""}, "content": "aaaa"}] * 2},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "Prepend", "prepend": "x" * 100_000},
    {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False},
    {"type": "Sequence", "pretokenizers": [{"type": "UnicodeScripts"}] * 50},
    {"type": "NoSuchPart"},
)


def bytes_of(r: random.Random, data: bytes) -> bytes:
    """Change, remove, repeat or replace some bytes, mostly near the start, where headers are."""
    if not data:
        return r.randbytes(r.randint(0, 64))
    at = int(len(data) * r.random() ** r.choice((1, 4)))
    span = min(len(data) - at, int(2 ** r.uniform(0, 9)))
    edited = bytearray(data)
    kind = r.randrange(7)
    if kind == 0:
        for _ in range(r.randint(1, 8)):
            edited[min(len(data) - 1, int(len(data) * r.random() ** 3))] ^= 1 << r.randrange(8)
    elif kind == 1:
        edited[at : at + span] = r.randbytes(span)
    elif kind == 2:
        edited[at : at + span] = bytes([r.choice((0, 255, 0x28, 0x52, 0x7D))]) * span
    elif kind == 3:
        del edited[at:]
    elif kind == 4:
        edited[at:at] = data[at : at + span]
    elif kind == 5:
        del edited[at : at + span]
    else:
        edited += r.randbytes(span)
    return bytes(edited)


def nodes(value: Any, at: tuple = ()) -> list[tuple]:
    """Paths of all values below ``value``."""
    out = [at] if at else []
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            out += nodes(inner, (*at, key))
    return out


def json_of(r: random.Random, text: str) -> str:
    """Replace, remove, rename or add one value."""
    value = json.loads(text)
    paths = nodes(value)
    if not paths:
        return "[]"
    shallow = [p for p in paths if len(p) <= 2]
    *above, last = r.choice(r.choice((paths, shallow)) or paths)
    inner = value
    for key in above:
        inner = inner[key]
    kind = r.randrange(5)
    if kind == 0:
        del inner[last]
    elif kind == 1 and isinstance(inner, dict):
        inner[r.choice((*TEXTS, str(last) + "x"))] = inner.pop(last)
    elif kind == 2:
        inner[last] = r.choice(EVIL_PARTS)
    elif kind == 3:
        inner[last] = r.choice((None, True, [], {}, [[]], {"": {}}, 1.5, float("nan"), float("-inf"), *TEXTS))
    else:
        inner[last] = r.choice(NUMBERS)
    return json.dumps(value)


def tokenizer_of(r: random.Random, text: str) -> str:
    """Give a tokenizer another normalizer, pre-tokenizer or model, or other ids."""
    value = json.loads(text)
    kind = r.randrange(4)
    if kind == 0:
        value["normalizer"] = r.choice(EVIL_PARTS)
    elif kind == 1:
        value["pre_tokenizer"] = r.choice(EVIL_PARTS)
    elif kind == 2:
        for entry in value.get("added_tokens") or []:
            entry["id"] = r.choice((entry["id"], -entry["id"], r.choice(NUMBERS)))
    else:
        part = r.choice(("type", "unk_token", "vocab", "dropout"))
        value["model"] = {**value["model"], part: r.choice((*TEXTS, 3, {}))}
    return json.dumps(value)


def safetensors_of(r: random.Random, data: bytes) -> bytes:
    """Change the header: names, shapes, types, offsets, metadata."""
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    name = r.choice(names)
    entry = header[name]
    kind = r.randrange(9)
    if kind == 0:
        header[r.choice((re.sub(r"\d+", lambda m: str(r.choice(NUMBERS)), name), *TEXTS))] = header.pop(name)
    elif kind == 1:
        entry["shape"] = r.choice(
            ([], [0], [2**60, 0], [0, 2**31], [1] * 40, entry["shape"][::-1], [*entry["shape"], 1], [-1], ["1"], None)
        )
        if 0 in (entry["shape"] or [1]):
            entry["data_offsets"] = [entry["data_offsets"][0]] * 2
    elif kind == 2:
        entry["dtype"] = r.choice(("F64", "F16", "BF16", "I64", "BOOL", "F8_E4M3", "F4", "X", "", 3))
    elif kind == 3:
        entry["data_offsets"] = [r.choice((0, 8, len(body), *NUMBERS)) for _ in range(2)]
    elif kind == 4:
        header["__metadata__"] = {**header.get("__metadata__", {}), r.choice(KEYS): r.choice(TEXTS)}
    elif kind == 5:
        metadata = header.get("__metadata__") or {"heads": "2"}
        key = r.choice(list(metadata))
        change = tokenizer_of if key == "tokenizer" and r.random() < 0.5 else json_of
        metadata[key] = change(r, metadata[key]) if metadata[key][:1] == "{" else str(r.choice((*NUMBERS, *TEXTS)))
        header["__metadata__"] = metadata
    elif kind == 6:  # many blocks, with nothing in them
        prefix, number, rest = (re.split(r"(\d+)", name, maxsplit=1) + ["0", ""])[:3]
        end = entry["data_offsets"][1]
        for i in range(r.choice((30, 600, 20_000))):
            nothing = {"dtype": "F32", "shape": r.choice(([0], [2**40, 0])), "data_offsets": [end, end]}
            header[f"{prefix}{int(number or 0) + i}{rest}x"] = nothing
    elif kind == 7:
        del header[name]
    else:
        header[r.choice(TEXTS) + "."] = r.choice((entry, {}, [], 3, None))
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    if r.random() < 0.05:
        text = text.replace(b'"shape"', b'"shape": [], "shape"', 1)
    return len(text).to_bytes(8, "little") + text + body


def pickled_of(r: random.Random, data: bytes, canary: Path) -> bytes:
    """Change what ``torch.save`` was given, or its archive, or its pickle."""
    kind = r.randrange(10)
    if kind >= 5:
        return archive_of(r, data, canary) if data[:2] == b"PK" else bytes_of(r, data)
    found = torch.load(io.BytesIO(data), weights_only=False)
    nest = next(key for key in ("model_ema", "model") if key in found)
    state = found[nest]
    name = r.choice(list(state))
    if kind == 0:
        found[r.choice(("args", "model", "epoch"))] = Payload(canary)
    elif kind == 1:
        state[r.choice((name, "x", 3, None, *TEXTS[:-2]))] = r.choice(
            (None, 3, "x", torch.ones(1).expand(10**6, 10**3), torch.tensor(1.0), torch.zeros(0, 2**40),
             torch.ones(3).to_sparse(), torch.ones(2, dtype=torch.complex64), torch.full((3,), torch.nan),
             state[name].double(), state[name].t())
        )  # fmt: skip
    elif kind == 2:
        state[re.sub(r"\d+", lambda m: str(r.choice(NUMBERS)), name)] = state.pop(name)
    elif kind == 3:
        nested = {nest: {nest: found}}
        found = r.choice((state, {"model": found}, [found], nested, {"sd": state, "args": {"dim": 10**30}}))
    else:
        nested: Any = ()
        for _ in range(r.choice((10, 200, 900))):
            nested = (nested,)
        found["nested"] = r.choice((nested, [[]] * 1000, {nested: 1}, bytearray(1000), b"x" * 1000))
    out = io.BytesIO()
    torch.save(found, out)
    return out.getvalue()


def archive_of(r: random.Random, data: bytes, canary: Path) -> bytes:
    """Write a zip file again: compressed, with records changed, or with another pickle."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    pickle = next(name for name in records if name.endswith("data.pkl"))
    body, kind = records[pickle], r.randrange(5)
    if kind == 0:
        records[r.choice(list(records))] = b"\0" * r.choice((0, 1, 10**6))
    elif kind == 1:
        records[pickle] = bytes_of(r, body)
    elif kind == 2:
        at = r.randrange(2, len(body))
        call = b"cos\nmkdir\nX" + len(str(canary)).to_bytes(4, "little") + str(canary).encode() + b"\x85R0"
        records[pickle] = body[:at] + call + body[at:]
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED if kind == 3 else zipfile.ZIP_STORED) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    if kind == 4:
        return r.choice((b"PK\x03\x04" + out.getvalue(), out.getvalue() + b"PK\x05\x06" + bytes(18)))
    return out.getvalue()


def mutate(r: random.Random, path: Path, outside: Path, canary: Path, fresh: bool) -> None:
    """Mutate a file, or one file of a folder, in place.

    Args:
        outside: a file that links may refer to.
        canary: what a payload creates.
        fresh: the file is unchanged so far; only then a pickle is loaded, to be changed.
    """
    if path.is_dir():
        file = r.choice(sorted(p for p in path.iterdir() if p.is_file() and not p.is_symlink()) or [path / "x"])
        action = r.randrange(10)
        if action == 0 or not file.exists():
            file.unlink(missing_ok=True)
            if r.random() < 0.7:
                file.symlink_to(outside)
            return
        mutate(r, file, outside, canary, fresh)
        return
    data = path.read_bytes()
    changes: list[Callable[[], bytes]] = [lambda: bytes_of(r, data)]
    if path.suffix == ".safetensors":
        changes += [lambda: safetensors_of(r, data)] * 4
    elif path.suffix in (".pt", ".pth") and fresh:
        changes += [lambda: pickled_of(r, data, canary)] * 4
    elif path.suffix == ".json":
        changes += [lambda: json_of(r, data.decode()).encode("utf-8", "surrogatepass")] * 3
        if path.name == "tokenizer.json":
            changes += [lambda: tokenizer_of(r, data.decode()).encode("utf-8", "surrogatepass")] * 3
    try:
        path.write_bytes(r.choice(changes)())
    except Exception:  # an earlier mutation left nothing of that structure
        path.write_bytes(bytes_of(r, data))
