"""MAR and KL files to models: official key lists, shapes, dtypes, metadata, and what is wrong in one sentence."""

import json
from pathlib import Path

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders import hub
from fastar_nodes.model_loaders.autoencoders import load_kl
from fastar_nodes.model_loaders.mar import load_mar
from fastar_nodes.model_loaders.networks.autoencoder import KLAutoencoder, KLConfig
from fastar_nodes.model_loaders.networks.mar import MAR, MARConfig, initialise
from safetensors.torch import load_file, save_file

TINY = MARConfig(
    dim=8,
    encoder_depth=1,
    decoder_depth=2,
    heads=2,
    buffer=2,
    tokens=4,
    channels=4,
    classes=3,
    head_depth=1,
    head_width=8,
)
KL_TINY = KLConfig(ch=8, ch_mult=(1, 2), blocks=1, z_channels=4, encoder_attention=frozenset({1}), groups=4)


def keys(path: Path) -> dict[str, torch.Tensor]:
    """A key list as a state dict without memory."""
    return {k: torch.empty(shape, device="meta") for k, shape in json.loads(path.read_text()).items()}


@pytest.fixture
def tiny(tmp_path: Path):
    """Writes a tiny MAR, after ``change(state)``, with metadata; gives its path."""

    def write(change=lambda state: None, **metadata: str) -> Path:
        torch.manual_seed(0)
        state = {k: v.clone() for k, v in initialise(MAR(TINY)).state_dict().items()}
        change(state)
        path = tmp_path / "tiny.safetensors"
        save_file(state, path, metadata={"heads": "2", **metadata})
        return path

    return write


@pytest.fixture
def tiny_kl(tmp_path: Path):
    """Writes a tiny KL autoencoder, after ``change(state)``; gives its path."""

    def write(change=lambda state: None, **metadata: str) -> Path:
        torch.manual_seed(0)
        state = {k: v.clone() for k, v in KLAutoencoder(KL_TINY).state_dict().items()}
        change(state)
        save_file(state, tmp_path / "kl.safetensors", metadata={"groups": "4", **metadata})
        return tmp_path / "kl.safetensors"

    return write


# ---------------------------------------------------------------------------------------------- official files


@pytest.mark.parametrize(
    ("size", "shape", "parameters", "count"),
    [
        ("b", (768, 12, 12, 12, 6, 1024), 207_924_768, 364),
        ("l", (1024, 16, 16, 16, 8, 1280), 478_326_304, 476),
        ("h", (1280, 20, 20, 16, 12, 1536), 942_403_104, 604),
    ],
)
def test_full_size_mar_keys(mar_fixtures: Path, size: str, shape: tuple, parameters: int, count: int) -> None:
    official = keys(mar_fixtures / f"mar_{size}_keys.json")
    config = MARConfig.from_state_dict(official)
    assert (
        config.dim,
        config.encoder_depth,
        config.decoder_depth,
        config.heads,
        config.head_depth,
        config.head_width,
    ) == shape
    assert (config.tokens, config.buffer, config.channels, config.classes) == (256, 64, 16, 1000)
    with torch.device("meta"):
        ours = MAR(config).state_dict()
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in official.items()}
    assert len(ours) == count and sum(v.numel() for v in ours.values()) == parameters


def test_full_size_kl_keys(mar_fixtures: Path) -> None:
    official = keys(mar_fixtures / "kl16_keys.json")
    config = KLConfig.from_state_dict(official)
    assert (config.ch, config.ch_mult, config.blocks, config.z_channels) == (128, (1, 1, 2, 2, 4), 2, 16)
    assert (config.encoder_attention, config.decoder_attention, config.stride) == ({4}, frozenset(), 16)
    with torch.device("meta"):
        ours = KLAutoencoder(config).state_dict()
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in official.items()}
    assert len(ours) == 312 and sum(v.numel() for v in ours.values()) == 66_456_019


def test_reference_mar_loads(mar_fixtures: Path) -> None:
    path = mar_fixtures / "tiny_mar_f16.safetensors"
    with pytest.raises(UserError, match="width 64 is none of the official sizes.*'heads'"):
        load_mar(path)
    model = load_mar(path, heads=4)
    assert (model.name, model.latent_scale, model.t_max, model.patch, model.label_set) == (
        "tiny_mar_f16",
        0.2325,
        999,
        1,
        "",
    )
    stored = load_file(path)
    assert all(torch.equal(v, stored[k].float()) for k, v in model.net.state_dict().items())
    assert not model.net.training and not any(p.requires_grad for p in model.net.parameters())
    assert not any(p.is_meta for p in model.net.parameters())


def test_reference_kl_loads(mar_fixtures: Path) -> None:
    model = load_kl(mar_fixtures / "tiny_vae_f16.safetensors")
    assert model.net.config.stride == 4 and next(model.net.parameters()).dtype == torch.float32
    assert not model.net.training and not any(p.requires_grad for p in model.net.parameters())


def test_published_layouts(tmp_path: Path, tiny, tiny_kl) -> None:
    pytest.importorskip("torch", minversion="2.6")
    state = load_file(tiny())
    torch.save({"model": {k: v + 1 for k, v in state.items()}, "model_ema": state, "epoch": 1}, tmp_path / "last.pth")
    ours = load_mar(tmp_path / "last.pth", heads=2)
    assert ours.name == "last" and torch.equal(ours.net.mask_token, state["mask_token"])
    # Upstream reads kl16.ckpt without strictness because of what its training loss left behind.
    kl = load_file(tiny_kl())
    with_loss = {**kl, "loss.logvar": torch.zeros(()), "loss.discriminator.main.0.weight": torch.ones(2)}
    torch.save({"model": with_loss}, tmp_path / "kl16.ckpt")
    with pytest.raises(UserError, match="num_groups .32"):
        load_kl(tmp_path / "kl16.ckpt")
    save_file(with_loss, tmp_path / "with_loss.safetensors", metadata={"groups": "4"})
    assert torch.equal(load_kl(tmp_path / "with_loss.safetensors").net.quant_conv.weight, kl["quant_conv.weight"])


@pytest.mark.parametrize("entry", [e for e in hub.entries("mar") if e.built_in], ids=lambda e: e.id)
def test_the_demo_loads_with_its_decoder(root: Path, tmp_path: Path, entry: hub.Entry) -> None:
    if not (root / "demo" / "checkpoints").is_dir():
        pytest.skip("the demo is not trained in this checkout")
    path = hub.resolve(entry.id, "mar", [], tmp_path)
    model, kl = load_mar(path), load_kl(hub.resolve(entry.decoder, "kl", [], tmp_path))
    assert hub.decoder_for("renamed.safetensors", path) == entry.decoder
    assert model.net.config.channels == kl.net.config.z_channels * model.patch**2
    assert model.label_set == "picture-book" and 1 <= model.t_max < 999


# -------------------------------------------------------------------------------------------- dtype, metadata


def test_the_last_layer_computes_in_fp32(tiny) -> None:
    head = load_mar(tiny(), dtype="fp16").net.head
    out = head(torch.randn(3, 4), torch.tensor([0, 500, 999]), torch.zeros(3, 8, dtype=torch.float16))
    assert out.dtype == torch.float32 and out.shape == (3, 8)


def test_metadata_is_used(tiny) -> None:
    path = tiny(
        latent_scale="1.0", t_max="950", patch="2", label_set="picture-book", name=" a\nsmall\tMAR " + "x" * 200
    )
    model = load_mar(path)
    assert (model.latent_scale, model.t_max, model.patch, model.label_set) == (1.0, 950, 2, "picture-book")
    assert model.name.startswith("a small MAR xx") and len(model.name) == 80
    assert model.net.config.heads == 2


def test_imagenet_labels_by_default(tiny) -> None:
    def thousand(state: dict) -> None:
        state["class_emb.weight"] = torch.zeros(1000, TINY.dim)

    assert load_mar(tiny(thousand)).label_set == "imagenet-1k"
    assert load_mar(tiny(thousand, label_set="birds")).label_set == "birds"


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"heads": "four"}, "heads = four.*a whole number"),
        ({"heads": "0"}, "heads = 0.*from 1"),
        ({"heads": "3"}, "3 does not divide the width 8"),
        ({"heads": "9" * 9999}, "heads = 9+"),
        ({"latent_scale": "nan"}, "latent_scale = nan.*a number from"),
        ({"latent_scale": "-1"}, "latent_scale = -1"),
        ({"latent_scale": "[1]"}, "latent_scale"),
        ({"t_max": "1000"}, "t_max = 1000.*from 1 to 999"),
        ({"t_max": "950.5"}, "t_max = 950.5.*a whole number"),
        ({"patch": "3"}, "patch = 3.*4 channels"),
        ({"patch": ""}, "patch = .*a whole number"),
    ],
)
def test_bad_metadata(tiny, entry: dict, words: str) -> None:
    with pytest.raises(UserError, match=f"^checkpoint: tiny.safetensors .*{words}"):
        load_mar(tiny(**entry))


# ------------------------------------------------------------------------------------------------ wrong files


def renumber(state: dict) -> None:
    for key in [k for k in state if k.startswith("decoder_blocks.1.")]:
        state[key.replace("blocks.1.", "blocks.7.")] = state.pop(key)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("class_emb.weight"), "class_emb.weight is missing"),
        (lambda s: s.update(mask_token=torch.ones(1, 1, 9)), r"1 misshaped \(mask_token is 1x1x9, not 1x1x8\)"),
        (lambda s: s.update({"class_emb.weight": torch.ones(3)}), "misshaped"),
        (lambda s: s.update({"encoder_pos_embed_learned": torch.ones(1, 3, 8)}), "missing or empty"),
        (lambda s: s.update({"diffusion_pos_embed_learned": torch.ones(1, 5, 8)}), "5 tokens are no square"),
        (renumber, r"its blocks decoder_blocks\.\* are not numbered 0 to 1"),
    ],
)
def test_what_does_not_fit_a_mar(tiny, change, words: str) -> None:
    with pytest.raises(UserError, match=f"^checkpoint: tiny.safetensors .*{words}") as error:
        load_mar(tiny(change))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("encoder.conv_in.weight"), "encoder.conv_in.weight is missing"),
        (lambda s: s.update({"lossless.weight": torch.ones(1)}), r"1 unexpected \(lossless.weight\)"),
        (lambda s: s.update({"encoder.down.x.weight": torch.ones(1)}), "does not fit a KL autoencoder"),
    ],
)
def test_what_does_not_fit_a_kl(tiny_kl, change, words: str) -> None:
    with pytest.raises(UserError, match=f"^decoder: kl.safetensors .*{words}"):
        load_kl(tiny_kl(change))
    with pytest.raises(UserError, match="^decoder: kl.safetensors .*groups = none"):
        load_kl(tiny_kl(groups="none"))


def test_of_an_official_training_the_averaged_weights_are_loaded(tmp_path):
    """The layout of checkpoint-last.pth: weights, their moving average, and the arguments of the training."""
    import argparse

    torch.manual_seed(0)
    raw, averaged = (MAR(MARConfig(16, 1, 1, 2, 2, 4, 4, 5, 1, 16)).state_dict() for _ in range(2))
    for state in (raw, averaged):
        for value in state.values():
            value.normal_()
    (tmp_path / "mar_tiny").mkdir()
    path = tmp_path / "mar_tiny" / "checkpoint-last.pth"
    arguments = argparse.Namespace(model="mar_base", lr=1e-4)
    torch.save({"model": raw, "model_ema": averaged, "optimizer": {}, "epoch": 799, "args": arguments}, path)
    model = load_mar(path, "fp32", heads=2)
    assert model.name == "mar_tiny"
    assert all(torch.equal(value, averaged[name]) for name, value in model.net.state_dict().items())


def test_initialisation_is_the_official_one():
    torch.manual_seed(0)
    net = initialise(MAR(TINY))
    for name, p in net.named_parameters():
        zero = "adaLN_modulation" in name or "final_layer.linear" in name or name.endswith("bias")
        ones = p.ndim == 1 and name.endswith("weight")
        assert bool((p == 0).all()) == zero, name
        assert bool((p == 1).all()) == ones, name
        if (
            name in ("class_emb.weight", "fake_latent", "mask_token")
            or "embed_learned" in name
            or "time_embed" in name
            and p.ndim == 2
        ):
            assert 0.01 < float(p.std()) < 0.03, name
