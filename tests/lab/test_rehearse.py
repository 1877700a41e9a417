"""The files of a rehearsal: official names, shapes and dtypes, little space, and one entry from hub to first step."""

import hashlib
import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from fastar_nodes.cli.subject import all_entries
from fastar_nodes.lab.release import rehearse
from fastar_nodes.model_loaders.autoencoders.loader import load_kl, load_vq
from fastar_nodes.model_loaders.bitdance.loader import load_binary, load_bitdance
from fastar_nodes.model_loaders.catalogue import hub, official
from fastar_nodes.model_loaders.files.checkpoint import read
from fastar_nodes.model_loaders.hybrid.loader import load_hybrid
from fastar_nodes.model_loaders.janus.loader import load_janus, load_janus_head, load_janus_vision, load_janus_vq
from fastar_nodes.model_loaders.llamagen.loader import load_llamagen
from fastar_nodes.model_loaders.mar.loader import load_mar
from fastar_nodes.model_loaders.tar.loader import load_detokenizer, load_ta_tok, load_tar
from fastar_nodes.networks.janus import PromptImages
from fastar_nodes.networks.llama import cache_bytes

pytestmark = pytest.mark.slow

SHAPES = {"small.weight": (2, 3), "norm.weight": (5,), "large": (600, 1000)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["x.safetensors", "x.pth", "x.bin"])
def test_a_file_is_read_and_its_zeros_take_no_space(tmp_path, name, dtype):
    path = tmp_path / name
    digest = rehearse.write_weights(path, SHAPES, {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype], copies=False)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()

    state = read(path).state
    assert {key: tuple(tensor.shape) for key, tensor in state.items()} == SHAPES
    assert {tensor.dtype for tensor in state.values()} == {dtype}
    assert not state["large"].any() and state["small.weight"].any()
    assert path.stat().st_size > 600 * 1000 * dtype.itemsize


def test_shards_hold_every_weight_once():
    parts = list(rehearse._shards({str(i): (10,) for i in range(10)}, 3))
    assert [sorted(part) for part in parts] == [["0", "1", "2"], ["3", "4", "5", "6"], ["7", "8", "9"]]


def test_no_shard_is_empty_beside_a_large_weight():
    parts = list(rehearse._shards({"encoder": (12,), "decoder.rest": (16,)}, 2))
    assert [list(part) for part in parts] == [["encoder"], ["decoder.rest"]]


def test_the_sizes_of_the_catalogue_are_those_of_the_shapes():
    """The download refuses a pinned file of another size: 5 %."""
    for entry in (entry for kind in ("mar", "kl", "vq", "llamagen") for entry in hub.entries(kind)):
        if entry.sha256 and entry.id in ("mar-base", "kl16", "vq16-c2i", "llamagen-b-256"):
            numbers = sum(map(math.prod, rehearse.shapes_of(entry).values()))
            assert entry.size == pytest.approx(4 * numbers, rel=0.01)
    assert set(rehearse.KEYS) <= set(official.NETWORKS)


DOWNLOADS = {e.id: e for e in all_entries() if e.network}
# Loaded by transformers.
APART = ("flan-t5-xl",)
LOAD = {
    "mar": load_mar,
    "kl": load_kl,
    "vq": load_vq,
    "llamagen": load_llamagen,
    "dtok": load_detokenizer,
    "hybrid": load_hybrid,
    "janus": load_janus,
    "tar": load_tar,
    "ta-tok": partial(load_ta_tok, encoder=False),
    "bitdance": load_bitdance,
    "bitdance-ae": load_binary,
}


@pytest.mark.parametrize("name", [name for name, entry in DOWNLOADS.items() if name not in APART])
def test_the_official_names_load_as_the_published_network(tmp_path, name):
    """Of the file there is the header alone: the loader runs on the device "meta", where no weight is read."""
    entry = DOWNLOADS[name]
    files = rehearse.files_of(entry)
    if not entry.parts:
        (shapes,) = files.values()
        files = {f"{Path(entry.file).stem}.safetensors": shapes}

    for file, shapes in files.items():
        header, size = rehearse.header_of(shapes, entry.dtype or "bf16")
        with (tmp_path / file).open("wb") as opened:
            opened.write(header)
            opened.truncate(len(header) + size)
    needed = {part.name for part in entry.files if part.name.endswith(".json") and not part.optional}
    for part in needed | {"config.json", "tokenizer.json"}:
        (tmp_path / part).write_text(rehearse.text_of(entry, part))

    model = LOAD[entry.family](tmp_path if entry.parts else tmp_path / file, "fp32", "meta")
    net = model.hybrid if entry.family == "hybrid" else model.net
    assert official.shapes_of(net) == official.shapes(entry.network)
    if entry.family == "janus":
        reads_and_answers(model, entry.network, tmp_path)


def reads_and_answers(model, network, folder):
    """What reads images and the output layer for words are in the same files; shapes of an edit and of an answer."""
    # 1. The parts.
    vq = load_janus_vq(folder, "fp32", "meta")
    vision = load_janus_vision(folder, vq, "fp32", "meta")
    head = load_janus_head(folder, "fp32", "meta")
    assert official.shapes_of(vision.net) == official.shapes(official.vision_of(network))
    assert head.lm_head.weight.shape == model.net.words.weight.shape

    # 2. An image, in rows of the tower and in codes.
    pixels = torch.zeros(1, 3, 384, 384, device="meta")
    rows = vision.net(pixels)
    codes = vq.net.codes(vq.net.features(pixels)).flatten(1)
    assert vision.side == 384 and rows.shape == (1, 576, model.net.config.dim) and codes.shape == (1, 576)

    # 3. An edit: three branches of one length, and a prediction of each.
    ids = torch.tensor([model.image_prompt("make it night")], device="meta")
    first_row, first_code = model.image_places()
    prefix = model.net.image_prefix(ids, PromptImages(rows, codes, first_row, first_code), None, part=True, guided=True)
    hidden, cache = model.net.prefill(prefix, model.grid, model.tokens - 1)
    assert prefix.shape == (3, ids.shape[1], model.net.config.dim) and ids.shape[1] > 1165
    assert model.net.logits(hidden).shape == (3, 1, 16384)
    assert sum(block.nbytes for block in cache.blocks) == cache_bytes(model.net, 3 * (ids.shape[1] + 575))

    # 4. A word.
    question = torch.tensor([model.question("what is it?")], device="meta")
    hidden, _ = model.net.prefill(model.net.words(question), model.grid, 512)
    assert question.shape[1] > 589 and head(model.net.norm(hidden[:, -1:])).shape == (1, 1, 102_400)


@pytest.mark.parametrize("name", ["bitdance-14b-64x", "bitdance-14b-16x"])
def test_the_files_of_a_14b_hold_the_published_network(name):
    """Without the output layer, which is not read, and the autoencoder, which is another network."""
    files = rehearse.files_of(DOWNLOADS[name])
    assert set(files) == {f"{part}.safetensors" for part in ("model", "vision_head", "projector", "ae")}
    wanted = {key: shape for key, shape in files["model.safetensors"].items() if not key.startswith("lm_head.")}
    wanted |= {f"head.{key}": shape for key, shape in files["vision_head.safetensors"].items()}
    wanted |= {f"projector.{key}": shape for key, shape in files["projector.safetensors"].items()}
    assert official.shapes(DOWNLOADS[name].network) == wanted
    assert files["ae.safetensors"] == official.shapes("BitDance-AE")

    part = {"64x": 64, "16x": 16}[name.rpartition("-")[2]]
    assert json.loads(rehearse.text_of(DOWNLOADS[name], "vision_head_config.json"))["parallel_num"] == part
    assert f'"<|query_{part - 1}|>"' in rehearse.text_of(DOWNLOADS[name], "tokenizer.json")


@pytest.mark.parametrize("name", ["qwen2.5-tokenizer", "kl16"])
def test_an_entry_from_the_hub_to_its_first_evaluation(lab, name):
    answer = lab("rehearse", name)
    assert answer.code == 0 and "lines pass" in answer.out, answer


@pytest.mark.parametrize(
    ("found", "code"), [("7 lines pass", 0), ("failed: files: pass", 1), ("not run: too large", 1)]
)
def test_the_exit_code_is_that_of_the_rows(lab, monkeypatch, found, code):
    monkeypatch.setattr(rehearse, "rehearse", lambda entry, *others: [entry.id, "", "", "", "", "", found])
    assert lab("rehearse kl16").code == code


def test_the_file_of_the_table_is_tested_before_the_first_entry(lab, sentence, monkeypatch, tmp_path):
    monkeypatch.setattr(rehearse, "rehearse", lambda *_: pytest.fail("an entry was rehearsed"))
    (tmp_path / "file").touch()
    for name in ("file/table.md", "table.docx"):
        assert sentence(lab("rehearse kl16 --out", tmp_path / name)).startswith("out: ")


def test_shards_come_with_their_index(tmp_path, monkeypatch):
    """Of the folders whose files no record names."""
    entry = DOWNLOADS["janus-4o-7b"]
    monkeypatch.setattr(rehearse, "shapes_of", lambda entry: SHAPES)
    monkeypatch.setattr(rehearse, "SHARD", 1_500_000)
    digests = rehearse.write_entry(entry, tmp_path)

    folder = tmp_path / str(entry.repo)
    assert [part.name for part in entry.shards(folder)] == [f"model-{i:05}-of-00002.safetensors" for i in (1, 2)]
    assert {path.name for path in folder.iterdir()} == set(digests)
    files = [read(folder / part.name).state for part in entry.shards(folder)]
    assert {**files[0], **files[1]}.keys() == SHAPES.keys()


def test_tied_weights_are_written_once(tmp_path):
    names = ("llm.model.embed_tokens.weight", "llm.lm_head.weight")
    path = tmp_path / "harmon.pth"
    rehearse.write_weights(path, dict.fromkeys(names, (600, 1000)), "bf16", copies=False)

    state = read(path).state
    assert set(state) == set(names)
    assert 2 * 600 * 1000 < path.stat().st_size < 2.1 * 600 * 1000
