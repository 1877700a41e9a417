"""LlamaGen and PAR files to models: nestings, head count, the grid from four sources, and what is wrong in one sentence."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders import hub
from fastar_nodes.model_loaders.checkpoint import choose_dtype
from fastar_nodes.model_loaders.llamagen import load_llamagen
from fastar_nodes.model_loaders.networks.llama import Llama, LlamaConfig
from safetensors.torch import save_file

TINY = LlamaConfig(dim=16, depth=2, heads=2, kv_heads=2, hidden=24, vocab=20, condition="class", condition_size=3)
TEXT = replace(TINY, condition="text", condition_size=12, text_rows=6)
PAR = replace(TINY, special=3)


def weights(config: LlamaConfig = TINY, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {k: torch.randn(v.shape, generator=g) for k, v in Llama(config).state_dict().items()}


@pytest.fixture
def tiny(tmp_path: Path):
    """Writes a tiny GPT, after ``change(state)``, with metadata; gives its path."""

    def write(change=lambda state: None, config: LlamaConfig = TINY, name: str = "tiny", **metadata: str) -> Path:
        state = weights(config)
        change(state)
        path = tmp_path / f"{name}.safetensors"
        save_file(state, path, metadata={"heads": "2", "grid": "4", **metadata})
        return path

    return write


# ---------------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize(
    "config", [TINY, TEXT, PAR, replace(PAR, special=15)], ids=["class", "text", "par 4x", "par 16x"]
)
def test_every_kind_loads(tiny, config: LlamaConfig) -> None:
    model = load_llamagen(tiny(config=config))
    assert model.net.config == config and (model.grid, model.name, model.label_set) == (4, "tiny", "")
    assert model.regions == config.special + 1
    expected = weights(config)
    assert all(torch.equal(v, expected[k]) for k, v in model.net.state_dict().items())
    assert not model.net.training and not any(p.requires_grad or p.is_meta for p in model.net.parameters())


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: s,
        lambda s: {"model": s},
        lambda s: {"module": s},
        lambda s: {"state_dict": s},
        lambda s: {"module": {"module": s}},
        lambda s: {"model": {f"module.{k}": v for k, v in s.items()}},
        lambda s: {"model": s, "optimizer": {"state": {}}, "steps": 7, "args": argparse.Namespace(gpt_model="GPT-B")},
    ],
    ids=["FSDP", "DDP", "DeepSpeed", "Lightning", "twice", "prefix", "training"],
)
def test_official_nestings(tmp_path: Path, wrap) -> None:
    pytest.importorskip("torch", minversion="2.6")
    state = weights()
    torch.save(wrap(state), tmp_path / "c2i_B_256.pt")
    model = load_llamagen(tmp_path / "c2i_B_256.pt", heads=2)
    assert model.grid == 16 and model.name == "c2i_B_256"
    assert torch.equal(model.net.output.weight, state["output.weight"])


def test_imagenet_labels_by_default(tiny) -> None:
    thousand = replace(TINY, condition_size=1000)
    assert load_llamagen(tiny(config=thousand)).label_set == "imagenet-1k"
    assert load_llamagen(tiny(config=thousand, label_set="birds")).label_set == "birds"
    assert load_llamagen(tiny(config=replace(TEXT, condition_size=1000))).label_set == ""


def test_a_stored_rotation_table_is_dropped(tiny) -> None:
    model = load_llamagen(tiny(lambda s: s.update(freqs_cis=torch.full((17, 4, 2), float("nan")))))
    assert "freqs_cis" not in model.net.state_dict()


def test_bf16_where_hardware_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, expected in (
        ((6, 1), torch.float32),
        ((7, 5), torch.float16),
        ((8, 0), torch.bfloat16),
        ((9, 0), torch.bfloat16),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert choose_dtype("auto", "cuda:0", bf16=True) == expected
    assert choose_dtype("auto", "cuda:0") == torch.float16 and choose_dtype("auto", "cpu", bf16=True) == torch.float32


# ------------------------------------------------------------------------------------------------------- grid


@pytest.mark.parametrize(
    ("name", "config", "grid"),
    [
        ("c2i_B_256", TINY, 16),
        ("c2i_L_384", TINY, 24),
        ("t2i_XL_stage1_256", TEXT, 16),
        ("t2i_XL_stage2_512", TEXT, 32),
        ("my-fine_tune.512px", TINY, 32),
        ("PAR-XL-4x", PAR, 24),
        ("par-3b-16x (1)", PAR, 24),
        ("PAR-256", PAR, 16),
    ],
)
def test_grid_from_the_name(tiny, tmp_path: Path, name: str, config: LlamaConfig, grid: int) -> None:
    save_file(weights(config), tmp_path / f"{name}.safetensors")
    assert load_llamagen(tmp_path / f"{name}.safetensors", heads=2).grid == grid
    assert load_llamagen(tmp_path / f"{name}.safetensors", heads=2, grid=grid).grid == grid


@pytest.mark.parametrize("config", [TINY, TEXT, PAR], ids=["class", "text", "par"])
def test_grid_from_a_rotation_table(tmp_path: Path, config: LlamaConfig) -> None:
    rows = (config.text_rows or 1) + config.special + 8 * 8
    path = tmp_path / "c2i_B_256.safetensors"
    save_file({**weights(config), "freqs_cis": torch.zeros(rows, 4, 2)}, path)
    assert load_llamagen(path, heads=2).grid == 8, "what is in the file goes before its name"
    with pytest.raises(UserError, match="^grid: c2i_B_256.safetensors is for 8x8 tokens, not 16x16; choose auto$"):
        load_llamagen(path, heads=2, grid=16)
    save_file({**weights(config), "freqs_cis": torch.zeros(rows + 1, 4, 2)}, path)
    assert load_llamagen(path, heads=2).grid == 16, "a table of no square grid says nothing"


def test_grid_given_by_hand(tmp_path: Path) -> None:
    for name in ("tuned", "tuned_from_256_to_384", "c2i_2560"):
        path = tmp_path / f"{name}.safetensors"
        save_file(weights(), path)
        with pytest.raises(UserError, match=f"^grid: {name}.safetensors .*; choose one of 16 .256 pixels"):
            load_llamagen(path, heads=2)
        assert load_llamagen(path, heads=2, grid=24).grid == 24
    with pytest.raises(UserError, match="is for 16x16 or 24x24 tokens, not 32x32; choose auto"):
        load_llamagen(tmp_path / "tuned_from_256_to_384.safetensors", heads=2, grid=32)
    for wrong in (-1, 0, 1, 129, 10**9):
        with pytest.raises(UserError, match=f"^grid: {wrong} tokens a side is outside 2 to 128"):
            load_llamagen(tmp_path / "tuned.safetensors", heads=2, grid=wrong)


def test_a_wrong_grid_is_refused(tiny) -> None:
    with pytest.raises(UserError, match="^grid: tiny.safetensors is for 4x4 tokens, not 8x8; choose auto$"):
        load_llamagen(tiny(), grid=8)
    with pytest.raises(
        UserError, match="^grid: 5x5 tokens cannot be divided into the 2x2 regions of the PAR tiny.safetensors"
    ):
        load_llamagen(tiny(config=PAR, grid="5"))


# ------------------------------------------------------------------------------------------------ wrong files


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"heads": "two"}, "heads = two.*a whole number"),
        ({"heads": "3"}, "heads: 3 does not fit the width 16"),
        ({"heads": "8"}, "heads: 8 does not fit the width 16"),
        ({"grid": "big"}, "grid = big.*a whole number from 2 to 128"),
        ({"grid": "1"}, "grid = 1"),
        ({"grid": "1000000"}, "grid = 1000000"),
    ],
)
def test_bad_metadata(tiny, entry: dict, words: str) -> None:
    with pytest.raises(UserError, match=f"^checkpoint: tiny.safetensors .*{words}"):
        load_llamagen(tiny(**entry))


def test_unknown_head_count(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "c2i_256.safetensors")
    with pytest.raises(UserError, match="^checkpoint: .* width 16 is none of the official sizes.*'heads'"):
        load_llamagen(tmp_path / "c2i_256.safetensors")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("layers.0.attention.wqkv.weight"), "layers.0.attention.wqkv.weight is missing"),
        (
            lambda s: [s.pop(k) for k in list(s) if k.startswith("layers.0.")],
            "layers.0.attention.wqkv.weight is missing",
        ),
        (
            lambda s: s.update({"layers.7.ffn_norm.weight": torch.ones(16)}),
            r"its blocks layers\.\* are not numbered 0 to 2",
        ),
        (
            lambda s: s.update({"layers.0.attention.wqkv.weight": torch.ones(47, 16)}),
            "does not fit the attention weights",
        ),
        (lambda s: s.update({"layers.0.attention.wqkv.weight": torch.ones(())}), "misshaped"),
        (lambda s: s.update({"tok_embeddings.weight": torch.ones(20)}), "embeddings are misshaped"),
        (lambda s: s.update({"cls_embedding.embedding_table.weight": torch.ones(1, 16)}), "missing or empty"),
        (
            lambda s: s.update({"cls_embedding.embedding_table.weight": torch.ones(1, 2, 16)}),
            "embeddings are misshaped",
        ),
        (
            lambda s: s.update({"spe_tok_embeddings.special_embeddings.weight": torch.ones(4, 16)}),
            "4 transition tokens",
        ),
        (lambda s: s.update({"spe_tok_embeddings.special_embeddings.weight": torch.ones(3, 9)}), "misshaped"),
    ],
)
def test_what_does_not_fit(tiny, change, words: str) -> None:
    with pytest.raises(UserError, match=f"^checkpoint: tiny.safetensors .*({words})") as error:
        load_llamagen(tiny(change))
    assert "\n" not in str(error.value) and len(str(error.value)) < 1200


@pytest.mark.parametrize("entry", [e for e in hub.entries("llamagen") if not e.built_in], ids=lambda e: e.id)
def test_every_catalogued_name_tells_its_grid(tmp_path: Path, entry: hub.Entry) -> None:
    special = 15 if entry.id.endswith("16x") else 3 if entry.id.startswith("par") else 0
    save_file(weights(replace(TINY, special=special)), tmp_path / entry.file)
    expected = int(entry.id.split("-")[-1]) // 16 if not special else 24
    assert load_llamagen(tmp_path / entry.file, heads=2).grid == expected
    assert hub.decoder_for("renamed", tmp_path / entry.file, "llamagen") == entry.decoder
