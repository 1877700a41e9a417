"""Rehearse the check of every catalogue entry, with files of the official names, shapes and dtypes but no real weights.

    python -m fastar_nodes.lab rehearse                # all entries, smallest first
    python -m fastar_nodes.lab rehearse mar-base kl16

A hub on this machine offers the files. For each entry a new process downloads them, checks them, and runs one AR step
(of a decoder, encoder or language model one evaluation). The table lists what that took beside what was estimated.
Large matrices are zero, so the files take little space where they are offered, but their full size where they are
downloaded to; they are deleted after their entry, and a decoder that several entries need at the end. A model whose
weights are too large in 16 bits is loaded with blocks of 8 bits.
"""

import argparse
import hashlib
import http.server
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from ...cli.subject import Subject, all_entries, needed, parameters
from ...model_loaders import kinds
from ...model_loaders.catalogue import hub, official
from ...networks.quantized import INT8
from ...networks.ta_tok import TATok
from ...reports.files import as_text, output, replace_file
from ...reports.table import markdown
from ...runs.memory.fitting import DRAWING, need
from ...samplers.blocks import canvas as block_canvas
from ..training.captions import word_level

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests" / "parity"
# Recorded names and shapes of official files, where they hold more than the network needs.
KEYS = {
    "MAR-B": "mar/mar_b_keys",
    "MAR-L": "mar/mar_l_keys",
    "MAR-H": "mar/mar_h_keys",
    "KL-16": "mar/kl16_keys",
    "VQ-16": "vq/keys_vq_16",
    "VQ-8": "vq/keys_vq_8",
    "Harmon-0.5B": "harmon/hybrid_shapes_harmon_0_5b",
    "Harmon-1.5B": "harmon/hybrid_shapes_harmon_1_5b",
    "UniPic-1.5B": "unipic/hybrid_shapes_unipic_1_5b",
    "Janus-Pro-1B": "janus/janus_keys_1b_original",
    "Janus-Pro-7B": "janus/janus_keys_7b_transformers",
}
TYPES = {"fp32": (torch.float32, np.float32, "F32"), "bf16": (torch.bfloat16, np.uint16, "BF16")}
# Tensors up to this many numbers get random values.
SMALL = 1 << 18
# Bytes that are written at once; zeros are left out of the file.
BLOCK = 1 << 20
# Bytes that the weights may take, in GB.
MOST = 9.0
# Bytes of the largest shard that transformers writes by default.
SHARD = 5_000_000_000


# ------------------------------------------------------------------------------------------------ files


def shapes_of(entry: hub.Entry) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights in the official files of an entry."""
    if entry.network in KEYS:
        recorded = json.loads((RECORDED / f"{KEYS[entry.network]}.json").read_text(encoding="utf-8-sig"))
        return {name: tuple(shape) for name, shape in recorded.get("keys", recorded).items()}

    if entry.network == "TA-Tok":
        config = replace(
            official.official_ta_tok(),
            encoder_depth=26,
            encoder_heads=16,
            encoder_hidden=4304,
            patch=14,
            side=27,
            input_size=384,
        )
        with torch.device("meta"):
            return official.shapes_of(TATok(config))

    shapes = dict(official.shapes(entry.network))
    if entry.family == "bitdance":  # the autoencoder is in the file
        for name, shape in official.shapes("BitDance-AE").items():
            shapes[f"vae.{name}"] = shape
    if entry.family == "t5":  # the rest of the file is the decoder
        width = shapes["shared.weight"][1]
        rest = (entry.size or 0) // 4 - sum(map(math.prod, shapes.values()))
        shapes["decoder.rest"] = (rest // width, width)
    return shapes


def files_of(entry: hub.Entry) -> dict[str, dict[str, tuple[int, ...]]]:
    """Names and shapes of the weights of an entry, by the name of the file that holds them."""
    if entry.network.startswith("BitDance-14B"):
        recorded = json.loads((RECORDED / "bitdance" / "bitdance_keys_14b.json").read_text(encoding="utf-8-sig"))
        files = dict(recorded["files"])
        if entry.network.endswith("16x"):
            files["model"] = {**files["model"], **recorded["16x_differs"]["model"]}

        found = {}
        for name, shapes in files.items():
            found[f"{name}.safetensors"] = {key: tuple(shape) for key, shape in shapes.items()}
        return found

    shapes = shapes_of(entry)
    if entry.index is not None:
        _, numbers, _ = TYPES[_stored_dtype(entry)]
        size = sum(map(math.prod, shapes.values())) * np.dtype(numbers).itemsize
        count = math.ceil(size / SHARD)
        names = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    else:
        names = [part.name for part in entry.files if part.name in entry.weights or not entry.parts]

    return dict(zip(names, _shards(shapes, len(names)), strict=True))


def _stored_dtype(entry: hub.Entry) -> str:
    """The dtype of an entry's files: as the catalogue states it, else by their size, else fp32."""
    if entry.dtype:
        return entry.dtype

    is_half = entry.size is not None and entry.size < 3 * parameters(entry)
    return "bf16" if is_half else "fp32"


def tensor_of(name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
    """A weight: random if it is small, else zero, without the memory that the zeros would take."""
    kind, numbers, _ = TYPES[dtype]
    if math.prod(shape) > SMALL:
        zeros: Any = torch.from_numpy(np.zeros(shape, numbers))
        return zeros.view(kind) if dtype == "bf16" else zeros

    generator = torch.Generator().manual_seed(sum(name.encode()))
    values = torch.randn(shape, generator=generator) * 0.02
    is_norm = len(shape) == 1 and name.endswith("weight")
    return (values + is_norm).to(kind)


class Sparse:
    """A file for torch.save whose blocks of zeros take no space, and its digest."""

    def __init__(self, opened: BinaryIO):
        self.opened = opened
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.digest.update(view)
        for first in range(0, len(view), BLOCK):
            block = view[first : first + BLOCK]
            if np.frombuffer(block, np.uint8).any():
                self.opened.write(block)
            else:
                self.opened.seek(len(block), os.SEEK_CUR)
        return len(view)

    def flush(self) -> None:
        self.opened.flush()


def write_weights(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str, copies: bool) -> str:
    """Write weights in the format of the file's ending; returns the digest. ``copies``: also as averaged weights."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as opened:
        sparse = Sparse(opened)
        if path.suffix == ".safetensors":
            _write_safetensors(sparse, shapes, dtype)
        else:
            state: dict[str, Any] = {name: tensor_of(name, shape, dtype) for name, shape in shapes.items()}
            if "llm.lm_head.weight" in state:  # tied weights, which torch.save writes once
                state["llm.lm_head.weight"] = state["llm.model.embed_tokens.weight"]
            if path.suffix == ".bin":
                content: Any = state
            elif copies:
                content = {"model": state, "model_ema": {name: tensor.clone() for name, tensor in state.items()}}
            else:
                content = {"model": state}
            torch.save(content, sparse)
        opened.truncate(opened.tell())

    return sparse.digest.hexdigest()


def header_of(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> tuple[bytes, int]:
    """The header of a safetensors file with its length, and the bytes of the weights behind it."""
    _, numbers, label = TYPES[dtype]
    size = np.dtype(numbers).itemsize
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + size * math.prod(shape)
        header[name] = {"dtype": label, "shape": list(shape), "data_offsets": [begin, end]}

    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text, end


def _write_safetensors(sparse: Sparse, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> None:
    """Header and tensors, one after another."""
    header, _ = header_of(shapes, dtype)
    sparse.write(header)
    for name, shape in shapes.items():
        tensor = tensor_of(name, shape, dtype).contiguous()
        sparse.write(tensor.view(torch.int16 if dtype == "bf16" else torch.int32).numpy())


def write_entry(entry: hub.Entry, folder: Path) -> dict[str, str]:
    """Write the files of an entry below ``folder``, by their names in the repository; their digests by name."""
    dtype = _stored_dtype(entry)
    place = folder / str(entry.repo)
    digests: dict[str, str] = {}

    files = files_of(entry) if entry.network else {}
    for name, share in files.items():
        digests[name] = write_weights(place / name, share, dtype, copies=entry.id == "mar-base-ema")

    listed = {part.name for part in entry.files}
    shard_of = {key: name for name, share in files.items() if name not in listed for key in share}
    if shard_of:
        text = json.dumps({"weight_map": shard_of}).encode()
        (place / str(entry.index)).write_bytes(text)
        digests[str(entry.index)] = hashlib.sha256(text).hexdigest()

    for part in entry.files:
        needed = not part.optional or entry.family == "bitdance" and part.name == "tokenizer.json"
        if part.name not in digests and needed:
            (place / part.name).parent.mkdir(parents=True, exist_ok=True)
            text = text_of(entry, part.name).encode()
            (place / part.name).write_bytes(text)
            digests[part.name] = hashlib.sha256(text).hexdigest()

    return digests


def _shards(shapes: Mapping[str, tuple[int, ...]], count: int) -> Iterator[dict[str, tuple[int, ...]]]:
    """The weights in ``count`` parts of about equal size."""
    whole = sum(map(math.prod, shapes.values()))
    parts: list[dict[str, tuple[int, ...]]] = [{} for _ in range(count)]
    done = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        middle = done + size // 2
        parts[min(count - 1, middle * count // whole)][name] = shape
        done += size

    yield from parts


def text_of(entry: hub.Entry, name: str) -> str:
    """The content of a configuration or tokenizer."""
    if name == "tokenizer.json":
        return _tokenizer(entry)
    if name == "vocab.json":
        signs = [chr(n) for n in (*range(33, 127), *range(161, 173), *range(174, 256))]
        signs += [chr(256 + i) for i in range(256 - len(signs))]
        return json.dumps({sign: i for i, sign in enumerate(signs)})
    if name == "merges.txt":
        return "#version: 0.2\n"
    if entry.family == "tar":
        _, depth, heads, keys, _, tied = official.TAR_SIZES[entry.network]
        stated = {"model_type": "qwen2", "num_attention_heads": heads, "num_key_value_heads": keys}
        return json.dumps({**stated, "num_hidden_layers": depth, "tie_word_embeddings": tied})
    if entry.family == "bitdance":
        return _bitdance_settings(entry, name)
    return "{}"


def _bitdance_settings(entry: hub.Entry, name: str) -> str:
    """A configuration of a BitDance of prompts."""
    _, block = official.BITDANCES[entry.network]
    stated = {
        "config.json": {"model_type": "qwen3", "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128},
        "vision_head_config.json": {"ch_target": 32, "ch_cond": 5120, "ch_latent": 5120, "parallel_num": block},
        "ae_config.json": {"ddconfig": {"ch_mult": [1, 1, 2, 2, 4], "z_channels": 32}},
    }
    return json.dumps(stated[name])


def _tokenizer(entry: hub.Entry) -> str:
    """A tokenizer with the special tokens of an entry's family."""
    if entry.family == "janus":
        return (RECORDED / "janus_images" / "model" / "tokenizer.json").read_text(encoding="utf-8-sig")
    if entry.family == "t5":
        words = ["<pad>", "</s>", "<unk>", "\u2581", "\u2581a", "\u2581red", "\u2581boat"]
        pieces = [[word, -float(i)] for i, word in enumerate(words)]
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        end = {"id": 1, "content": "</s>", "special": True, **plain}
        before = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
        model = {"type": "Unigram", "unk_id": 2, "vocab": pieces, "byte_fallback": False}
        made = {"version": "1.0", "added_tokens": [end], "pre_tokenizer": before, "model": model}
        return json.dumps({**made, "normalizer": None, "post_processor": None, "decoder": None})

    words = ["[UNK]", "user", "assistant", "generate", "an", "image", "a", "red", "boat", ":", "."]
    special = ["<|im_start|>", "<|im_end|>"]
    if entry.family == "bitdance":
        _, block = official.BITDANCES[entry.network]
        special.append("<|vision_start|>")
        special += [f"<|res_{i}|>" for i in range(1, 257)]
        special += [f"<|query_{i}|>" for i in range(1, block)]
    return json.dumps(word_level(words, special))


# ------------------------------------------------------------------------------------------------ hub


@contextmanager
def offered(folder: Path, digests: Mapping[str, str]) -> Iterator[str]:
    """A model hub on this machine; yields its address.

    Args:
        folder: its files, by repository and name.
        digests: their sha256, by "repository/name".
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(False)

        def do_GET(self) -> None:
            self.answer(True)

        def answer(self, whole: bool) -> None:
            repo, _, rest = self.path.lstrip("/").partition("/resolve/")
            name = rest.partition("/")[2].partition("?")[0]
            key = f"{repo}/{name}"
            if key not in digests:
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return

            path = folder / key
            self.send_response(200)
            self.send_header("ETag", f'"{digests[key]}"')
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("Content-Length", str(path.stat().st_size))
            self.end_headers()
            if whole:
                with path.open("rb") as opened:
                    self.wfile.flush()
                    self.connection.sendfile(opened)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


# ------------------------------------------------------------------------------------------------ one entry


def child(arguments: list[str]) -> int:
    """Check an entry whose digests are those of the rehearsal: (file of the digests, arguments of check)."""
    from ...cli.main import main as command

    known = json.loads(Path(arguments[0]).read_text(encoding="utf-8-sig"))
    entries = []
    for entry in hub.catalogue():
        own = known.get(entry.id)
        if own is not None:
            single = None if entry.parts else next(iter(own.values()))
            parts = {name: own.get(name.removesuffix("?")) for name in entry.parts}
            entry = replace(entry, sha256=single, parts=parts)
        entries.append(entry)

    hub.catalogue = lambda: tuple(entries)  # type: ignore[assignment]
    block_canvas.LARGE_HEAD = sys.maxsize  # an image of a 14B takes too long on a CPU, its first block does not
    if INT8 in arguments:  # what is not in 8 bits is in 16, as on a GPU
        kinds.fast_halves = lambda device: ("bf16",)  # type: ignore[assignment]
    return command(["check", *arguments[1:]])


def rehearse(entry: hub.Entry, work: Path, most: float, device: str) -> list[str]:
    """Rehearse one entry; returns its row of the table."""
    dtype = _dtype_that_fits(entry, most, device)
    if not dtype:
        return [entry.id, "", "", "", "", "", f"not run: the weights are more than {most:g} GB"]

    # 1. The files, on a hub.
    models = work / "models"
    _delete(models, work / "hub", entry)
    wanted = needed(Subject(entry.id, entry.family, entry), "auto", "auto", "auto", "flan-t5-xl", prompts=False)
    by_id = {one.id: one for one in all_entries()}
    digests: dict[str, dict[str, str]] = {}
    offers: dict[str, str] = {}
    for choice, kind in wanted:
        one = by_id[choice]
        if hub.absent(choice, kind, [models]) is None:  # a decoder that an earlier entry needed
            continue
        digests[choice] = write_entry(one, work / "hub")
        offers |= {f"{one.repo}/{name}": digest for name, digest in digests[choice].items()}
    (work / "digests.json").write_text(json.dumps(digests), encoding="utf-8")

    # 2. The check, in a process of its own.
    command = [sys.executable, "-m", "fastar_nodes.lab.release.rehearse", str(work / "digests.json")]
    command += ["--model", entry.id, "--quick", "--models", str(models), "--device", device]
    command += ["--dtype", dtype]
    command += ["--json", str(work / "check.json"), "--out", str(work / "check.png")]
    began = time.monotonic()
    with offered(work / "hub", offers) as address:
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    seconds = time.monotonic() - began

    # 3. The row.
    _delete(models, work / "hub", entry)
    if not (work / "check.json").is_file():
        return [entry.id, dtype, "", "", "", f"{seconds:.0f}", f"failed: {done.stderr.strip()[-300:]}"]
    found = json.loads((work / "check.json").read_text(encoding="utf-8-sig"))
    (work / "check.json").unlink()
    return _row(entry, dtype, found, seconds)


def _dtype_that_fits(entry: hub.Entry, most: float, device: str) -> str:
    """The dtype with the most bits in which the weights take at most ``most`` GB; "" if there is none."""
    count = parameters(entry)
    # MAR's random predictions end outside the range of fp16, which auto takes on a GPU.
    auto_fits = entry.family != "mar" or device == "cpu"

    if 4 * count <= most * 1e9 and auto_fits:
        return "auto"
    if 2 * count <= most * 1e9:
        return "bf16"
    if entry.family in DRAWING and need(entry, INT8).weights <= most * 1e9:
        return INT8
    return ""


def _row(entry: hub.Entry, dtype: str, found: Mapping[str, Any], seconds: float) -> list[str]:
    """The row of an entry by the results of its check."""
    lines = {line["check"]: line for line in found["lines"]}
    size = lines["files"]["figures"].get("bytes", 0) / 1e9
    memory = []
    for name in ("memory of the weights", "memory of a step", "memory of an evaluation"):
        figures = lines.get(name, {}).get("figures", {})
        if figures:
            memory.append(f"{figures['bytes'] / 1e6:,.0f} of {figures['estimate'] / 1e6:,.0f}")
    broken = [f"{line['check']}: {line['found']}" for line in lines.values() if line["result"] in ("differs", "failed")]
    passed = sum(line["result"] == "pass" for line in found["lines"])
    told = "; ".join(broken) or f"{passed} lines pass"
    return [entry.id, dtype, f"{size:.2f}", *(memory + ["", ""])[:2], f"{seconds:.0f}", told]


def _delete(models: Path, offers: Path, entry: hub.Entry) -> None:
    """Delete the files of an entry."""
    shutil.rmtree(offers / str(entry.repo), ignore_errors=True)
    for part in entry.files:
        (models / part.path).unlink(missing_ok=True)
    shutil.rmtree(models / entry.file, ignore_errors=True)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("entries", nargs="*", help="of the catalogue; default all that are downloads")
    parser.add_argument("--most", type=float, default=MOST, help=f"GB that the weights may take; default {MOST:g}")
    parser.add_argument("--device", default="cpu", help="where the AR step runs; default cpu")
    parser.add_argument("--out", metavar="FILE", help="file for the table, as Markdown")


def run(options: argparse.Namespace) -> int:
    """Run the command; exit code 1 if a line of an entry does not hold."""
    out = output(options.out, "out", (".md",))  # hours before it is written

    chosen = [entry for entry in all_entries() if not entry.built_in]
    chosen.sort(key=lambda entry: (parameters(entry), entry.id))
    if options.entries:
        by_id = {entry.id: entry for entry in chosen}
        chosen = [by_id[name] for name in options.entries]

    rows = [["entry", "dtype", "GB", "weights, MB", "step, MB", "s", "result"]]
    with tempfile.TemporaryDirectory(prefix="rehearse-") as work:
        os.environ["HF_HUB_CACHE"] = str(Path(work) / "cache")  # official files there would be used
        for entry in chosen:
            rows.append(rehearse(entry, Path(work), options.most, options.device))
            print(" | ".join(rows[-1]), flush=True)
            if out is not None:
                replace_file(out, as_text(markdown(rows) + "\n"))

    print(markdown(rows))
    return int(any(not row[-1].endswith("lines pass") for row in rows[1:]))


if __name__ == "__main__":
    sys.exit(child(sys.argv[1:]))
