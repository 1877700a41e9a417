"""MAR and KL files to models: official key lists, shapes, metadata, published layouts."""

import argparse
import json
from pathlib import Path

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.lab.training.initialise import initialise_mar
from fastar_nodes.model_loaders.autoencoders.loader import load_kl
from fastar_nodes.model_loaders.catalogue import hub
from fastar_nodes.model_loaders.files.checkpoint import read_metadata
from fastar_nodes.model_loaders.mar.loader import load_mar
from fastar_nodes.networks.autoencoder import HISTORY, KLAutoencoder, KLConfig, VQAutoencoder, VQConfig
from fastar_nodes.networks.mar import MAR, MARConfig
from safetensors.torch import load_file, save_file

TINY = MARConfig(8, encoder_depth=1, decoder_depth=2, heads=2, buffer=2, tokens=4, channels=4, classes=3,
                 head_depth=1, head_width=8)  # fmt: skip
KL_TINY = KLConfig(ch=8, ch_mult=(1, 2), blocks=1, z_channels=4, encoder_attention=frozenset({1}), groups=4)


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {k: torch.randn(v.shape) for k, v in MAR(TINY).state_dict().items()}


def base(dim: int, depth: int, heads: int, head_depth: int, head_width: int) -> MARConfig:
    shape = {"encoder_depth": depth, "decoder_depth": depth, "heads": heads}
    head = {"head_depth": head_depth, "head_width": head_width}
    return MARConfig(dim, **shape, **head, buffer=64, tokens=256, channels=16, classes=1000)


@pytest.mark.parametrize(
    ("listed", "net", "expected", "count", "parameters"),
    [
        ("mar/mar_b_keys", MAR, base(768, 12, 12, 6, 1024), 364, 207_924_768),
        ("mar/mar_l_keys", MAR, base(1024, 16, 16, 8, 1280), 476, 478_326_304),
        ("mar/mar_h_keys", MAR, base(1280, 20, 16, 12, 1536), 604, 942_403_104),
        ("mar/kl16_keys", KLAutoencoder, KLConfig(128, (1, 1, 2, 2, 4), 2, 16, frozenset({4})), 312, 66_456_019),
        ("vq/keys_vq_16", VQAutoencoder, VQConfig(128, (1, 1, 2, 2, 4), 2, 256, 16384, 8, 32), 343, 71_883_403),
        ("vq/keys_vq_8", VQAutoencoder, VQConfig(128, (1, 2, 2, 4), 2, 256, 16384, 8, 32), 299, 70_109_835),
    ],
)
@pytest.mark.fast_cases(1)
def test_official_names_and_shapes(root: Path, listed: str, net, expected, count: int, parameters: int) -> None:
    shapes = json.loads((root / "tests" / "parity" / f"{listed}.json").read_text())
    official = {k: torch.empty(shape, device="meta") for k, shape in shapes.get("keys", shapes).items()}
    assert type(expected).from_state_dict(official) == expected
    official.pop(HISTORY, None)
    with torch.device("meta"):
        ours = net(expected).state_dict()
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in official.items()}
    assert len(ours) == count and sum(v.numel() for v in ours.values()) == parameters


def test_the_references_load(mar_fixtures: Path) -> None:
    path = mar_fixtures / "tiny_mar_f16.safetensors"
    with pytest.raises(UserError, match="has the width 64, which no official model has.*'heads'"):
        load_mar(path)
    model, stored = load_mar(path, heads=4), load_file(path)
    assert (model.name, model.latent_scale, model.t_max, model.patch) == ("tiny_mar_f16", 0.2325, 999, 1)
    assert all(torch.equal(v, stored[k].float()) for k, v in model.net.state_dict().items())
    kl = load_kl(mar_fixtures / "tiny_vae_f16.safetensors")
    assert kl.net.config.stride == 4 and next(kl.net.parameters()).dtype == torch.float32


def test_what_a_training_left_in_a_kl_is_ignored(tmp_path: Path) -> None:
    """Upstream reads kl16.ckpt without strictness because of the weights of its loss."""
    kl = KLAutoencoder(KL_TINY).state_dict()
    with_loss = {**kl, "loss.logvar": torch.zeros(()), "loss.discriminator.main.0.weight": torch.ones(2)}
    save_file(with_loss, tmp_path / "x.safetensors", metadata={"groups": "4"})
    assert torch.equal(load_kl(tmp_path / "x.safetensors").net.quant_conv.weight, kl["quant_conv.weight"])


@pytest.mark.parametrize("entry", [e for e in hub.entries("mar") if e.built_in], ids=lambda e: e.id)
def test_the_demo_loads_with_its_decoder(root: Path, tmp_path: Path, entry: hub.Entry) -> None:
    if not (root / "demo" / "checkpoints").is_dir():
        pytest.skip("the demo is not trained in this checkout")
    path = hub.resolve(entry.id, "mar", [], tmp_path)
    model, kl = load_mar(path), load_kl(hub.resolve(entry.decoder, "kl", [], tmp_path))
    assert hub.decoder_for("renamed.safetensors", "mar", read_metadata(path)["decoder"]) == entry.decoder
    assert model.net.config.channels == kl.net.config.z_channels * model.patch**2
    assert model.label_set == "picture-book" and 1 <= model.t_max < 999


def test_the_last_layer_computes_in_fp32_and_metadata_is_used(tmp_path: Path) -> None:
    metadata = {"heads": "2", "latent_scale": "1.0", "t_max": "950", "patch": "2", "label_set": "picture-book"}
    save_file(state(), tmp_path / "x.safetensors", metadata=metadata)
    model = load_mar(tmp_path / "x.safetensors", dtype="fp16")
    assert (model.latent_scale, model.t_max, model.patch, model.label_set) == (1.0, 950, 2, "picture-book")
    out = model.net.head(torch.randn(3, 4), torch.tensor([0, 500, 999]), torch.zeros(3, 8, dtype=torch.float16))
    assert out.dtype == torch.float32 and out.shape == (3, 8)


def test_heads_that_the_user_chooses_go_before_those_that_the_file_states(tmp_path: Path) -> None:
    save_file(state(), tmp_path / "x.safetensors", metadata={"heads": "2"})
    assert load_mar(tmp_path / "x.safetensors").net.config.heads == 2
    assert load_mar(tmp_path / "x.safetensors", heads=4).net.config.heads == 4


def test_the_patch_of_a_training_is_that_of_its_arguments(tmp_path: Path) -> None:
    """A token of 4 channels is then a patch of 2 x 2 latents of one channel, unless the arguments lack it."""
    for arguments, patch in ((argparse.Namespace(patch_size=2), 2), (argparse.Namespace(lr=1e-4), 1)):
        torch.save({"model": state(), "args": arguments}, tmp_path / "x.pth")
        assert load_mar(tmp_path / "x.pth", "fp32", heads=2).patch == patch


def test_initialisation_is_the_official_one() -> None:
    torch.manual_seed(0)
    for name, p in initialise_mar(MAR(TINY)).state_dict().items():
        zero = "adaLN_modulation" in name or "final_layer.linear" in name or name.endswith("bias")
        assert bool((p == 0).all()) == zero, name
        assert bool((p == 1).all()) == (p.ndim == 1 and name.endswith("weight")), name
        table = name in ("class_emb.weight", "fake_latent", "mask_token") or "embed_learned" in name
        if table or "time_embed" in name and p.ndim == 2:
            assert 0.01 < float(p.std()) < 0.03, name
