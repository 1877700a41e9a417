"""LlamaGen, PAR and VQ files to models: nestings, head count, the grid from four sources."""

import argparse
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders import hub
from fastar_nodes.model_loaders.autoencoders import load_vq
from fastar_nodes.model_loaders.llamagen import load_llamagen
from fastar_nodes.model_loaders.networks.autoencoder import HISTORY, VQAutoencoder, VQConfig
from fastar_nodes.model_loaders.networks.llama import LlamaConfig
from safetensors.torch import load_file, save_file
from tar_files import detokenizer_state as weights

TINY = LlamaConfig(dim=16, depth=2, heads=2, kv_heads=2, hidden=24, vocab=20, condition="class", condition_size=3)
TEXT = replace(TINY, condition="text", condition_size=12, text_rows=6)
PAR = replace(TINY, special=3)


@pytest.fixture
def tiny(tmp_path: Path):
    """Writes a tiny GPT; gives its path."""

    def write(config: LlamaConfig = TINY, name: str = "tiny", rope: int = 0, **metadata: str) -> Path:
        tables = {"freqs_cis": torch.full((rope, 4, 2), float("nan"))} if rope else {}
        save_file({**weights(config), **tables}, tmp_path / f"{name}.safetensors", {"heads": "2", **metadata})
        return tmp_path / f"{name}.safetensors"

    return write


@pytest.mark.parametrize(
    "config", [TINY, TEXT, PAR, replace(PAR, special=15)], ids=["class", "text", "par 4x", "par 16x"]
)
def test_every_kind_loads(tiny, config: LlamaConfig) -> None:
    model, expected = load_llamagen(tiny(config, grid="4")), weights(config)
    assert model.net.config == config and (model.grid, model.name, model.label_set) == (4, "tiny", "")
    assert model.regions == config.special + 1
    assert all(torch.equal(v, expected[k]) for k, v in model.net.state_dict().items())


def training(state: dict) -> dict:
    """The layout of the official training, of which upstream evaluates the moving average."""
    others = {"optimizer": {"state": {}}, "steps": 7, "args": argparse.Namespace(gpt_model="GPT-B")}
    return {"model": {k: v + 1 for k, v in state.items()}, "ema": state, **others}


def test_of_an_official_training_the_averaged_weights_are_loaded(tmp_path: Path) -> None:
    state = weights(TINY)
    torch.save(training(state), tmp_path / "c2i_B_256.pt")
    model = load_llamagen(tmp_path / "c2i_B_256.pt", heads=2)
    assert model.grid == 16 and model.name == "c2i_B_256"
    assert torch.equal(model.net.output.weight, state["output.weight"])


def test_a_vq_ignores_its_statistics(tmp_path: Path, root: Path) -> None:
    # Official sizes need 32 groups, and a pickled file cannot say otherwise.
    state = VQAutoencoder(VQConfig(ch=32, ch_mult=(1, 1), blocks=1, z_channels=4, codes=12)).state_dict()
    torch.save(training({**state, HISTORY: torch.full((20,), float("nan"))}), tmp_path / "vq_ds8.pt")
    model = load_vq(tmp_path / "vq_ds8.pt")
    assert model.name == "vq_ds8" and torch.equal(model.net.quant_conv.weight, state["quant_conv.weight"])
    path = root / "tests" / "parity" / "vq" / "vq8_tiny.safetensors"
    stored, model = load_file(path), load_vq(path, "fp16")
    assert HISTORY in stored and model.name == "vq8_tiny" and model.net.config.stride == 8
    for key, value in model.net.state_dict().items():
        assert torch.equal(value, stored[key].to(value.dtype)), key
        assert (value.dtype == torch.float32) == (key == "quantize.embedding.weight"), key


@pytest.mark.parametrize(
    ("name", "config", "grid"),
    [
        ("c2i_B_256", TINY, 16),
        ("c2i_L_384", TINY, 24),
        ("t2i_XL_stage2_512", TEXT, 32),
        ("my-fine_tune.512px", TINY, 32),
        ("PAR-XL-4x", PAR, 24),
        ("par-3b-16x (1)", PAR, 24),
        ("PAR-256", PAR, 16),
    ],
)
def test_grid_from_the_name(tiny, name: str, config: LlamaConfig, grid: int) -> None:
    assert load_llamagen(tiny(config, name)).grid == load_llamagen(tiny(config, name), grid=grid).grid == grid


@pytest.mark.parametrize("entry", [e for e in hub.entries("llamagen") if not e.built_in], ids=lambda e: e.id)
def test_every_catalogued_name_tells_its_grid(tmp_path: Path, entry: hub.Entry) -> None:
    special = 15 if entry.id.endswith("16x") else 3 if entry.id.startswith("par") else 0
    save_file(weights(replace(TINY, special=special)), tmp_path / entry.file)
    expected = int(entry.id.split("-")[-1]) // 16 if not special else 24
    assert load_llamagen(tmp_path / entry.file, heads=2).grid == expected
    assert hub.decoder_for(str(tmp_path / entry.file), "llamagen") == entry.decoder


@pytest.mark.parametrize("config", [TINY, TEXT, PAR], ids=["class", "text", "par"])
def test_grid_from_a_rotation_table(tiny, config: LlamaConfig) -> None:
    rows = (config.text_rows or 1) + config.special + 8 * 8
    path = tiny(config, "c2i_B_256", rows)
    assert load_llamagen(path).grid == 8, "what is in the file goes before its name"
    with pytest.raises(UserError, match="^grid: "):
        load_llamagen(path, grid=16)
    assert load_llamagen(tiny(config, "c2i_B_256", rows + 1)).grid == 16, "a table of no square grid says nothing"
    save_file({**weights(config), "freqs_cis": torch.zeros(())}, path)
    with pytest.raises(UserError, match="^checkpoint: .* misshaped"):
        load_llamagen(path, heads=2)


def test_a_grid_that_is_unknown_or_wrong(tiny) -> None:
    for name in ("tuned", "tuned_from_256_to_384", "c2i_2560"):
        with pytest.raises(UserError, match=f"^grid: {name}.safetensors "):
            load_llamagen(tiny(name=name))
        assert load_llamagen(tiny(name=name), grid=24).grid == 24
    for name, stated, wrong in (
        ("tuned_from_256_to_384", {}, 32),
        ("tiny", {"grid": "4"}, 8),
        *(("tuned", {}, wrong) for wrong in (-1, 0, 1, 129, 10**9)),
    ):
        with pytest.raises(UserError, match="^grid: "):
            load_llamagen(tiny(name=name, **stated), grid=wrong)
    with pytest.raises(UserError, match="^grid: 5x5 tokens cannot be divided into the 2x2 regions"):
        load_llamagen(tiny(PAR, grid="5"))
