"""The KL decoder in strips: equal to whole maps, and the memory that it is said to need."""

from __future__ import annotations

import pytest
import torch
from fastar_nodes.model_loaders.networks import kl, strips
from fastar_nodes.model_loaders.networks.kl import KLAutoencoder, KLConfig
from live_bytes import counted

# Two of the levels change the number of channels; one has attention.
CONFIG = KLConfig(ch=8, ch_mult=(1, 2, 2), blocks=1, z_channels=4, decoder_attention=frozenset({2}), groups=4)
OFFICIAL = KLConfig(ch=128, ch_mult=(1, 1, 2, 2, 4), blocks=2, z_channels=16)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def net():
    net, g = KLAutoencoder(CONFIG).eval().requires_grad_(False), torch.Generator().manual_seed(0)
    for name, p in net.named_parameters():
        p.copy_(torch.randn(p.shape, generator=g) * (0.5 / p[0].numel() ** 0.5 if p.ndim > 1 else 0.3))
        if "norm" in name and name.endswith("weight"):
            p.add_(1)
    return net


def latents(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("strip", [1, 700, 3000, 1 << 22])
@pytest.mark.parametrize("size", [(1, 4, 9, 7), (2, 4, 6, 11)])
def test_strips_are_the_whole_picture(net, size, strip):
    """Strips of two rows, of some, that do not divide the height, and of everything: within 1e-5 of the largest value."""
    x = net.post_quant_conv(latents(*size))
    whole = net.decoder(x)
    assert whole.std() > 0.05
    assert (strips.decode(net.decoder, x.clone(), strip) - whole).abs().max() < 1e-5 * whole.abs().max()


def test_statistics_of_a_part_would_be_another_picture(net):
    """What the test above would catch: tiles that are normalised by themselves."""
    x = net.post_quant_conv(latents(1, 4, 8, 8))
    whole, parts = net.decoder(x), torch.cat([net.decoder(part) for part in x.chunk(2, 2)], 2)
    assert (parts - whole).abs().max() > 0.01 * whole.abs().max()


def test_large_pictures_are_decoded_in_strips_one_by_one(net, monkeypatch):
    """And small ones whole, as before."""
    seen: list[int] = []
    monkeypatch.setattr(kl, "WHOLE", 8 * 8 * CONFIG.stride**2)
    original = strips.decode
    monkeypatch.setattr(strips, "decode", lambda decoder, x: seen.append(len(x)) or original(decoder, x))
    with torch.no_grad():
        net.decode(latents(2, 4, 8, 8))
        assert not seen
        large = net.decode(latents(2, 4, 8, 9))
    assert seen == [1, 1]
    assert (large - net.decoder(net.post_quant_conv(latents(2, 4, 8, 9)))).abs().max() < 1e-5 * large.abs().max()


@pytest.mark.parametrize("grid", [32, 64])
def test_the_official_decoder_needs_what_is_estimated(monkeypatch, grid):
    """512 and 1024 pixels: tensors alive at once, on the meta device."""
    with torch.device("meta"):
        net = KLAutoencoder(OFFICIAL).requires_grad_(False)
    with torch.no_grad(), counted(monkeypatch) as live:
        net.decode(torch.empty(1, 16, grid, grid, device="meta"))
    assert live.peak <= net.decode_bytes(1, grid, grid) <= 4 * live.peak
    assert net.decode_bytes(1, 64, 64) < 1.2e9
