"""The training of the part that draws larger images: how it begins, what it changes, what it learns, and on what."""

from pathlib import Path
from typing import Any

import pytest
import tiny_demo as tiny
import torch
import torch.nn.functional as F
from fastar_nodes.lab.experiments import enlarged
from fastar_nodes.lab.training import enlarging_recipe as recipe
from fastar_nodes.lab.training import picture_book
from fastar_nodes.lab.training.recipes import psnr, save_checkpoint, to_signed
from fastar_nodes.lab.training.training import Job, generator, seeded
from fastar_nodes.model_loaders.autoencoders.loader import load_kl, load_vq
from fastar_nodes.model_loaders.bitdance.loader import load_binary
from fastar_nodes.model_loaders.files.checkpoint import read_metadata
from fastar_nodes.networks.autoencoder import KLAutoencoder, VQAutoencoder
from fastar_nodes.networks.binary import BinaryAutoencoder
from fastar_nodes.networks.enlarging import EnlargingConfig

pytestmark = pytest.mark.slow

KINDS: dict[str, Any] = {
    "kl": (KLAutoencoder, tiny.KL, load_kl),
    "vq": (VQAutoencoder, tiny.VQ, load_vq),
    "bitdance-ae": (BinaryAutoencoder, tiny.BINARY, load_binary),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.shrink_demo(monkeypatch)


def a_net(kind: str) -> Any:
    make, config, _ = KINDS[kind]
    return seeded(0, lambda: make(config)).eval().requires_grad_(False)


@pytest.mark.parametrize("kind", KINDS)
def test_the_part_begins_as_the_enlarged_image(kind: str) -> None:
    net = a_net(kind)
    whole = recipe.with_part(net)
    recipe.initialised(whole.enlarge)
    z = torch.randn(1, net.config.z_channels, 2, 2).sign()
    read = z if kind == "bitdance-ae" else net.decoder_input(net.codes(z)) if kind == "vq" else net.post_quant_conv(z)
    enlarged = F.interpolate(net.decoder(read), scale_factor=4, mode="bilinear")
    torch.testing.assert_close(whole.decode(z), enlarged)


@pytest.mark.parametrize("kind", KINDS)
def test_the_part_is_all_that_a_file_gains(kind: str, tmp_path: Path) -> None:
    net, path = a_net(kind), tmp_path / "own.safetensors"
    save_checkpoint(net, path, family=kind, groups=net.config.groups, name="own", note="kept")
    before = KINDS[kind][2](path).net
    recipe.train_enlarging(Job(tmp_path, steps=2, images=64), path, "enlarging", before)

    after = KINDS[kind][2](path)
    assert after.net.config.enlarging == tiny.ENLARGING and after.name == "own, enlarges 4 x"
    assert read_metadata(path) == {"family": kind, "groups": str(net.config.groups), "name": "own", "note": "kept"}
    plain = recipe.without_part(after.net)
    assert plain.config == before.config
    assert all(torch.equal(weight, before.state_dict()[name]) for name, weight in plain.state_dict().items())
    assert after.net.enlarge.paint.weight.abs().sum() > 0


def test_training_brings_the_image_closer_to_the_large_rendering(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without noise, which is larger than the latents of random weights."""
    monkeypatch.setattr(recipe, "LATENT_NOISE", 0.0)
    net, path = a_net("kl"), tmp_path / "own.safetensors"
    save_checkpoint(net, path, family="kl", groups=net.config.groups)
    whole = recipe.train_enlarging(Job(tmp_path, steps=150, images=64, fp32=True), path, "enlarging", net)

    scenes = picture_book.scenes(1, 64)
    small, large = (
        to_signed(torch.from_numpy(picture_book.render(scenes, side)[0]).permute(0, 3, 1, 2)) for side in (16, 64)
    )
    z = recipe.encode(net, small)
    enlarged = F.interpolate(net.decode(z), scale_factor=4, mode="bilinear")
    assert psnr(whole.decode(z), large) > psnr(enlarged, large) + 0.5


def test_another_part_is_where_a_training_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a rate of zero it stays."""
    monkeypatch.setattr("fastar_nodes.lab.training.training.Schedule.rate", lambda self, step: 0.0)
    start, net, path = recipe.with_part(a_net("kl")), a_net("vq"), tmp_path / "own.safetensors"
    save_checkpoint(net, path, family="vq", groups=net.config.groups)
    whole = recipe.train_enlarging(Job(tmp_path, steps=1, images=64), path, "enlarging", net, start)
    for name, weight in start.enlarge.state_dict().items():
        torch.testing.assert_close(whole.enlarge.state_dict()[name], weight)


def test_a_part_that_reads_fewer_levels_begins_with_what_it_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the other part's weights it takes those of the same shape. It draws the whole image, and begins grey."""
    start, net, path = recipe.with_part(a_net("kl")), a_net("vq"), tmp_path / "own.safetensors"
    rising = EnlargingConfig(width=8, fine=3, blocks=(0, 1, 0), rises=(5,))
    monkeypatch.setitem(recipe.PARTS, VQAutoencoder, rising)
    part = recipe.initialised(recipe.with_part(net).enlarge)
    recipe.begin_as(part, start.enlarge)
    taken = {name for name, weight in start.enlarge.state_dict().items() if name in part.state_dict()}
    taken -= {name for name in taken if name.startswith(("widen.", "smooth.", "paint.weight", "read.3"))}
    assert "level.1.0.conv1.weight" in taken and "read.2.weight" in taken
    assert all(torch.equal(part.state_dict()[name], start.enlarge.state_dict()[name]) for name in taken)

    save_checkpoint(net, path, family="vq", groups=net.config.groups)
    monkeypatch.setattr("fastar_nodes.lab.training.training.Schedule.rate", lambda self, step: 0.0)
    whole = recipe.train_enlarging(Job(tmp_path, steps=1, images=64), path, "enlarging", net)
    assert load_vq(path).net.config.enlarging == rising
    assert not whole.decode(torch.randn(1, 8, 2, 2)).any()


def test_latents_are_disturbed_as_a_sampler_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise of a std of 0 to 0.4 on KL latents, up to 4 % of the bits, other codes for some of the features."""
    kl = a_net("kl")
    kl.post_quant_conv.weight.copy_(torch.eye(8)[:, :, None, None])
    kl.post_quant_conv.bias.zero_()
    latents = torch.zeros(400, 8, 8, 8)
    std = recipe.disturbing(kl)(latents, generator(1, 0)).flatten(1).std(1)
    assert float(std.max()) < 0.44 and float(std.min()) < 0.02 and 0.18 < float(std.mean()) < 0.22

    bits = torch.ones(400, 16, 8, 8)
    wrong = (recipe.disturbing(a_net("bitdance-ae"))(bits, generator(1, 0)) < 0).float().mean((1, 2, 3))
    assert float(wrong.max()) < 0.07 and 0.015 < float(wrong.mean()) < 0.025

    vq = a_net("vq")
    near = torch.randn(1, 8, generator=generator(3, 0)) + 0.4 * torch.randn(32, 8, generator=generator(4, 0))
    vq.quantize.embedding.weight.copy_(near)
    codes = torch.randint(32, (40, 8, 8), generator=generator(1, 0))
    features = vq.vectors(codes)
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(vq, "decoder_input", lambda codes: seen.append(codes))
    recipe.disturbing(vq)(features, generator(2, 0))
    changed = (seen[0] != codes).float().mean()
    assert 0 < float(changed) < 0.2


def test_figures_of_a_decoder_by_hand() -> None:
    """Of the part as it begins, which enlarges bilinearly."""
    whole = recipe.with_part(a_net("kl")).eval().requires_grad_(False)
    whole.quant_conv.weight.mul_(20)  # latents beyond 1, as trained ones
    recipe.initialised(whole.enlarge)
    found = enlarged.reconstructions(whole, 16, 12)

    scenes = picture_book.scenes(enlarged.SEED, 12)
    truth, large = (
        to_signed(torch.from_numpy(picture_book.render(scenes, s)[0]).permute(0, 3, 1, 2)) for s in (16, 64)
    )
    small = recipe.without_part(whole).decode(recipe.encode(whole, truth))
    bilinear = F.interpolate(small, scale_factor=4, mode="bilinear").clamp(-1, 1)
    assert found[0] == pytest.approx(psnr(small.clamp(-1, 1), truth), abs=1e-3)
    assert found[1] == pytest.approx(psnr(F.avg_pool2d(bilinear, 4), truth), abs=1e-3)
    assert found[3] == pytest.approx(psnr(bilinear, large), abs=1e-3) and found[2] != found[3]
