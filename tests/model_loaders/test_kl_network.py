"""The KL decoder: batches of large pictures, and the memory that it is said to need."""

import pytest
import torch
from fastar_nodes.model_loaders.networks import autoencoder
from fastar_nodes.model_loaders.networks.autoencoder import KLAutoencoder, KLConfig
from live_bytes import counted

CONFIG = KLConfig(ch=8, ch_mult=(1, 2, 2), blocks=1, z_channels=4, decoder_attention=frozenset({2}), groups=4)
OFFICIAL = KLConfig(ch=128, ch_mult=(1, 1, 2, 2, 4), blocks=2, z_channels=16)

pytestmark = pytest.mark.usefixtures("one_thread")


def test_large_pictures_are_decoded_one_by_one(monkeypatch):
    torch.manual_seed(0)
    net, z = KLAutoencoder(CONFIG).eval().requires_grad_(False), torch.randn(3, 4, 6, 8)
    seen: list[int] = []
    net.decoder.register_forward_pre_hook(lambda module, given: seen.append(len(given[0])))
    whole = net.decode(z)
    monkeypatch.setattr(autoencoder, "WHOLE", 6 * 8 * CONFIG.stride**2 - 1)
    torch.testing.assert_close(net.decode(z), whole, rtol=1e-4, atol=1e-5)
    assert seen == [3, 1, 1, 1]


@pytest.mark.parametrize(("grid", "batch"), [(32, 1), (32, 3), (64, 1)])
def test_the_official_decoder_needs_what_is_estimated(monkeypatch, grid, batch):
    """512 and 1024 pixels: tensors alive at once, on the meta device."""
    with torch.device("meta"):
        net = KLAutoencoder(OFFICIAL).requires_grad_(False)
    with torch.no_grad(), counted(monkeypatch) as live:
        net.decode(torch.empty(batch, 16, grid, grid, device="meta"))
    assert live.peak <= net.decode_bytes(batch, grid, grid) <= 1.5 * live.peak
