"""LlamaGen, PAR and VQ files to models: nestings, head count, the grid from four sources."""

import argparse
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.autoencoders.loader import load_vq
from fastar_nodes.model_loaders.catalogue import hub
from fastar_nodes.model_loaders.llamagen.loader import load_llamagen
from fastar_nodes.networks.autoencoder import HISTORY, VQAutoencoder, VQConfig
from fastar_nodes.networks.llama import LlamaConfig
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.engine import Sampled, finish
from fastar_nodes.samplers.tokens.llamagen import llamagen
from fastar_nodes.samplers.tokens.settings import LlamaGenSettings
from fastar_nodes.samplers.tokens.token_noise import TokenNoise
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


def no_note_of(model) -> str:
    """The model's note without the one on its class embeddings."""
    return "; ".join(part for part in model.note.split("; ") if "class embeddings" not in part)


class TestTheOrderOfStatements:
    """User, then metadata, then arguments, then tables, then a default, then the name; a guess stands in the note."""

    def test_the_user_goes_before_the_file(self, tiny) -> None:
        model = load_llamagen(tiny(grid="4"), grid=8)
        assert model.grid == 8 and no_note_of(model) == "FastAR uses 8x8 tokens as requested, but the file states 4x4"
        assert no_note_of(load_llamagen(tiny(grid="4"), grid=4)) == ""

    @pytest.mark.parametrize("name", ["0250000", "step_512", "epoch-384", "gptB_bs1024", "c2i_B_512"])
    def test_arguments_go_before_the_name(self, tmp_path: Path, name: str) -> None:
        args = argparse.Namespace(image_size=256, downsample_size=16)
        torch.save({"model": weights(TINY), "args": args}, tmp_path / f"{name}.pt")
        model = load_llamagen(tmp_path / f"{name}.pt", heads=2)
        assert model.grid == 16 and no_note_of(model) == ""
        model = load_llamagen(tmp_path / f"{name}.pt", grid=24, heads=2)
        assert model.grid == 24 and "the file states 16x16" in model.note

    @pytest.mark.parametrize("name", ["model_256epochs", "512steps", "gpt-256-steps"])
    def test_a_count_in_the_name_is_no_size(self, tmp_path: Path, name: str) -> None:
        torch.save({"model": weights(TINY)}, tmp_path / f"{name}.pt")
        with pytest.raises(UserError, match="^grid: .* does not state the size of its images"):
            load_llamagen(tmp_path / f"{name}.pt", heads=2)

    def test_an_argument_that_cannot_be_read_does_not_stop_who_states_the_size(self, tmp_path: Path) -> None:
        torch.save({"model": weights(TINY), "args": {"image_size": "256 px"}}, tmp_path / "x.pt")
        with pytest.raises(UserError, match="image_size"):
            load_llamagen(tmp_path / "x.pt", heads=2)
        assert load_llamagen(tmp_path / "x.pt", grid=16, heads=2).grid == 16

    def test_the_size_of_a_token_is_an_argument_too(self, tmp_path: Path) -> None:
        torch.save({"model": weights(TINY), "args": {"image_size": 256, "downsample_size": 8}}, tmp_path / "x.pt")
        assert load_llamagen(tmp_path / "x.pt", heads=2).grid == 32

    def test_metadata_goes_before_arguments_and_both_before_a_table(self, tiny) -> None:
        about = {"args": '{"image_size": 256, "downsample_size": 16}'}
        assert load_llamagen(tiny(grid="4", **about)).grid == 4
        model = load_llamagen(tiny(rope=1 + 8 * 8, **about))
        assert model.grid == 16 and "as the file states, but its table of positions is for 8x8" in model.note

    def test_arguments_state_the_rows_of_a_condition(self, tiny) -> None:
        """266 rows are 256 tokens behind 10 rows, or 225 behind 41."""
        stated = load_llamagen(tiny(rope=266, args='{"cls_token_num": 41}', name="a"))
        assert stated.grid == 15 and no_note_of(stated) == ""
        guessed = load_llamagen(tiny(rope=266, name="a512"))
        assert guessed.grid == 16 and "RoPE table of 266 rows is for 16x16 tokens after 10 other rows" in guessed.note

    def test_a_guess_from_the_name_is_said(self, tiny) -> None:
        assert (
            no_note_of(load_llamagen(tiny(name="mine_256")))
            == "FastAR assumes 16x16 tokens, a guess from the file's name"
        )
        assert load_llamagen(tiny(name="mine_256"), grid=24).grid == 24
        for name in ("step_512", "epoch-256", "run-bs1024", "seed=384"):
            with pytest.raises(UserError, match="^grid: .* does not state the size of its images"):
                load_llamagen(tiny(name=name))
        with pytest.raises(UserError, match="^grid: .* has several image sizes in its name"):
            load_llamagen(tiny(name="from_256_to_512"))

    def test_buffers_of_inference_are_left_out(self, tiny) -> None:
        path = tiny(name="x_256")
        state = load_file(path)
        buffers = {"causal_mask": torch.ones(4, 4), "layers.0.attention.kv_cache.k_cache": torch.ones(2)}
        save_file({**state, **buffers}, path, {"heads": "2"})
        assert load_llamagen(path).grid == 16
        save_file({**state, "layers.0.attention.kv_cached": torch.ones(2)}, path, {"heads": "2"})
        with pytest.raises(UserError, match="1 weight unexpected"):
            load_llamagen(path)

    def test_heads(self, tiny, tmp_path: Path) -> None:
        for arguments in ({"heads": 4}, {"n_head": 4}, argparse.Namespace(num_heads=4)):
            torch.save({"model": weights(TINY), "args": arguments}, tmp_path / "x.pt")
            assert load_llamagen(tmp_path / "x.pt", grid=4).net.config.heads == 4
            assert load_llamagen(tmp_path / "x.pt", grid=4, heads=2).net.config.heads == 2


class TestNullClass:
    """The last class row is the null class unless the file or the user says otherwise."""

    def rows(self, path: Path, rows: int, **args: object) -> Path:
        config = replace(TINY, condition_size=rows - 1)
        torch.save({"model": weights(config), "args": {"image_size": 64, "heads": 2, **args}}, path / "x.pt")
        return path / "x.pt"

    @pytest.mark.parametrize(
        ("rows", "stated", "classes", "null", "noted"),
        [
            (10, {"num_classes": 10}, 10, False, False),
            (10, {"num_classes": 9}, 9, True, False),
            (10, {"class_dropout_prob": 0.0}, 10, False, False),
            (10, {"class_dropout_prob": 0.1}, 9, True, False),
            (10, {}, 9, True, True),
            (1000, {}, 1000, False, True),
            (1001, {}, 1000, True, False),
        ],
    )
    def test_what_a_file_states(self, tmp_path: Path, rows, stated, classes, null, noted) -> None:
        model = load_llamagen(self.rows(tmp_path, rows, **stated))
        assert (model.net.config.condition_size, model.net.config.null) == (classes, null)
        assert ("class embeddings are" in model.note) == noted
        assert len(model.net.cls_embedding.embedding_table.weight) == rows

    def test_the_user_goes_first(self, tmp_path: Path) -> None:
        path = self.rows(tmp_path, 10, num_classes=9)
        model = load_llamagen(path, classes=10)
        assert model.net.config.condition_size == 10 and not model.net.config.null
        with pytest.raises(
            UserError, match="^classes: x.pt has 10 class embeddings.* set classes to 9 .* otherwise to 10"
        ):
            load_llamagen(path, classes=8)
        with pytest.raises(UserError, match="^checkpoint: x.pt has 10 class embeddings"):
            load_llamagen(self.rows(tmp_path, 10, num_classes=1000))

    def test_the_last_class_is_drawn_and_guidance_refused(self, tmp_path: Path) -> None:
        model = load_llamagen(self.rows(tmp_path, 10, num_classes=10))
        settings, label = LlamaGenSettings(cfg=1.0), from_ids([9])

        def last(settings: LlamaGenSettings) -> Sampled:
            return finish(llamagen(model, label, settings, TokenNoise(0, (0,))))

        assert last(LlamaGenSettings()).report.settings["cfg"] == 1.0, "guidance is off by default"
        assert last(settings).latents.shape == (1, 4, 4)
        with pytest.raises(UserError, match="^cfg: x was trained without a null class.* set cfg to 1"):
            last(replace(settings, cfg=2.0))
        with pytest.raises(UserError, match="^condition: label 10 is outside 0 to 9, the class ids"):
            list(llamagen(model, from_ids([10]), settings, TokenNoise(0, (0,))))


def training(state: dict) -> dict:
    """The layout of the official training, of which upstream evaluates the moving average."""
    others = {"optimizer": {"state": {}}, "steps": 7, "args": argparse.Namespace(gpt_model="GPT-B")}
    return {"model": {k: v + 1 for k, v in state.items()}, "ema": state, **others}


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
        ("c2i_B_256_bs512", TINY, 16),
        ("2024-step-512_384px", TINY, 24),
        ("256px_at_512k", TINY, 16),
        ("256bs_384", TINY, 24),
        ("512epochs-256", TINY, 16),
        ("384_model_256-steps", TINY, 24),
    ],
)
@pytest.mark.fast_cases(5)
def test_grid_from_the_name(tiny, name: str, config: LlamaConfig, grid: int) -> None:
    assert load_llamagen(tiny(config, name)).grid == load_llamagen(tiny(config, name), grid=grid).grid == grid


@pytest.mark.parametrize("entry", [e for e in hub.entries("llamagen") if not e.built_in], ids=lambda e: e.id)
@pytest.mark.fast_cases(every=3)
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
    model = load_llamagen(path)
    assert model.grid == 8 and "table" not in model.note, "what is in the file goes before its name"
    model = load_llamagen(path, grid=16)
    assert model.grid == 16 and "16x16 tokens as requested, but the file has a table of positions for 8x8" in model.note
    longer = load_llamagen(tiny(config, "c2i_B_256", rows + 3))
    assert longer.grid == 8 and f"RoPE table of {rows + 3} rows is for 8x8 tokens" in longer.note
    save_file({**weights(config), "freqs_cis": torch.zeros(())}, path)
    with pytest.raises(UserError, match="^checkpoint: .* wrong shape"):
        load_llamagen(path, heads=2)


def test_a_grid_that_is_unknown_or_wrong(tiny) -> None:
    for name in ("tuned", "tuned_from_256_to_384", "c2i_2560"):
        with pytest.raises(UserError, match=f"^grid: {name}.safetensors "):
            load_llamagen(tiny(name=name))
        assert load_llamagen(tiny(name=name), grid=24).grid == 24
    assert load_llamagen(tiny(name="tuned_from_256_to_384"), grid=32).grid == 32
    for wrong in (-1, 0, 1, 129, 10**9):
        with pytest.raises(UserError, match="^grid: .* choose 2 to 128"):
            load_llamagen(tiny(name="tuned"), grid=wrong)
    with pytest.raises(UserError, match="^grid: 5x5 tokens cannot be divided into the 2x2 regions"):
        load_llamagen(tiny(PAR, grid="5"))
