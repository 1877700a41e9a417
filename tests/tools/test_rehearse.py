"""The files of a rehearsal: official names, shapes and dtypes, little space, and one entry from hub to first step."""

import hashlib
import math

import pytest
import torch
from fastar_nodes.model_loaders import hub, official
from fastar_nodes.model_loaders.checkpoint import read
from fastar_nodes.tools import rehearse

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
    assert [sorted(part) for part in parts] == [["0", "1", "2", "3"], ["4", "5", "6"], ["7", "8", "9"]]


def test_the_sizes_of_the_catalogue_are_those_of_the_shapes():
    """The download refuses a pinned file of another size: 5 %."""
    for entry in (entry for kind in ("mar", "kl", "vq", "llamagen") for entry in hub.entries(kind)):
        if entry.sha256 and entry.id in ("mar-base", "kl16", "vq16-c2i", "llamagen-b-256"):
            numbers = sum(map(math.prod, rehearse.shapes_of(entry).values()))
            assert entry.size == pytest.approx(4 * numbers, rel=0.01)
    assert set(rehearse.KEYS) <= set(official.NETWORKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2.5-tokenizer", "kl16"])
def test_an_entry_from_the_hub_to_its_first_evaluation(monkeypatch, capsys, name):
    monkeypatch.setattr(rehearse.sys, "argv", ["rehearse", name])
    assert rehearse.main() == 0, capsys.readouterr()
    assert "lines pass" in capsys.readouterr().out
