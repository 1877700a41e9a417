"""The autoencoders. VQ: shapes, codes and vectors both ways, what a
LATENT survives. KL: batches of large images, memory of decoding.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from fastar_nodes.networks import autoencoder
from fastar_nodes.networks.autoencoder import KLAutoencoder, KLConfig, VQAutoencoder, VQConfig
from live_bytes import counted

TINY = VQConfig(ch=8, ch_mult=(1, 1, 2), blocks=1, z_channels=6, codes=50, code_channels=5, groups=4)
CONFIG = KLConfig(ch=8, ch_mult=(1, 2, 2), blocks=1, z_channels=4, decoder_attention=frozenset({2}), groups=4)
OFFICIAL = KLConfig(ch=128, ch_mult=(1, 1, 2, 2, 4), blocks=2, z_channels=16)


@pytest.fixture
def net() -> VQAutoencoder:
    torch.manual_seed(0)
    net = VQAutoencoder(TINY).eval().requires_grad_(False)
    net.quantize.embedding.weight.mul_(torch.rand(50, 1) * 5 + 0.1)  # stored lengths do not matter
    return net


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        VQConfig(4, (1,), 1, 3, 7, 2, 2),
        VQConfig(4, (1, 3), 3, 3, 7, 8, 2),
        VQConfig(8, (2, 1, 1, 1), 2, 4, 9, 8, 8),
    ],
)
@pytest.mark.fast_cases(2)
def test_the_shape_is_read_off_any_state_dict(config: VQConfig) -> None:
    with torch.device("meta"):
        net = VQAutoencoder(config)
        assert VQConfig.from_state_dict(net.state_dict(), config.groups) == config
        vectors, codes = net.encode(torch.zeros(2, 3, 4 * config.stride, 2 * config.stride))
        assert vectors.shape == (2, config.code_channels, 4, 2) and codes.shape == (2, 4, 2)
        assert net.decode(vectors).shape == (2, 3, 4 * config.stride, 2 * config.stride)


def test_a_latent_holds_its_codes(net: VQAutoencoder) -> None:
    codes = torch.randint(50, (2, 3, 5))
    vectors = net.vectors(codes)
    assert vectors.shape == (2, 5, 3, 5) and vectors.dtype == torch.float32 and vectors.is_contiguous()
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(2, 3, 5))
    torch.testing.assert_close(vectors[1, :, 2, 4], F.normalize(net.quantize.embedding.weight[codes[1, 2, 4]], dim=0))
    # What may happen to it on the way: half precision, a factor, a little noise.
    for changed in (vectors.half(), vectors.bfloat16(), 3 * vectors, vectors + 1e-3 * torch.randn(vectors.shape)):
        assert torch.equal(net.codes(changed), codes)
        assert torch.equal(net.decode(changed), net.decode_codes(codes))
    assert torch.equal(net.codes(torch.zeros(1, 5, 2, 2)), torch.zeros(1, 2, 2, dtype=torch.int64))


def test_encode_gives_vectors_and_their_codes(net: VQAutoencoder) -> None:
    x = torch.rand(2, 3, 8, 12) * 2 - 1
    vectors, codes = net.encode(x)
    assert torch.equal(net.vectors(codes), vectors) and codes.dtype == torch.int64
    features = F.normalize(net.features(x), dim=1)
    distance = (features[:, None] - F.normalize(net.quantize.embedding.weight, dim=1)[None, :, :, None, None]).norm(
        dim=2
    )
    assert torch.equal(distance.argmin(1), codes)


def test_nearest_in_blocks_is_nearest_at_once(net: VQAutoencoder, monkeypatch: pytest.MonkeyPatch) -> None:
    features = torch.randn(101, 5)
    whole = net.quantize.nearest(features)
    for block in (1, 50, 50 * 7, 50 * 101, 50 * 1000):
        monkeypatch.setattr(autoencoder, "_BLOCK", block)
        assert torch.equal(net.quantize.nearest(features), whole)


def test_a_picture_does_not_depend_on_its_neighbours(net: VQAutoencoder) -> None:
    x = torch.rand(3, 3, 8, 8) * 2 - 1
    vectors, codes = net.encode(x)
    one = net.encode(x[1:2])
    assert torch.equal(one[1], codes[1:2])
    torch.testing.assert_close(net.decode(vectors)[1:2], net.decode(one[0]))


def test_an_autoencoder_without_1x1_convolutions_is_one_whose_convolutions_change_nothing():
    torch.manual_seed(0)
    plain = KLAutoencoder(replace(CONFIG, mixes=False)).eval().requires_grad_(False)
    assert KLConfig.from_state_dict(plain.state_dict(), CONFIG.groups) == replace(CONFIG, mixes=False)

    whole = KLAutoencoder(CONFIG).eval().requires_grad_(False)
    assert KLConfig.from_state_dict(whole.state_dict(), CONFIG.groups) == CONFIG
    whole.load_state_dict(plain.state_dict(), strict=False)
    for layer in (whole.quant_conv, whole.post_quant_conv):
        torch.nn.init.dirac_(layer.weight)
        layer.bias.zero_()

    images, latents = torch.rand(2, 3, 16, 24) * 2 - 1, torch.randn(2, 4, 4, 6)
    torch.testing.assert_close(plain.decode(latents), whole.decode(latents))
    for found, expected in zip(plain.encode(images), whole.encode(images), strict=True):
        torch.testing.assert_close(found, expected)


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
@pytest.mark.fast_cases("32-1")
def test_the_official_decoder_needs_what_is_estimated(monkeypatch, grid, batch):
    """512 and 1024 pixels: tensors alive at once, on the meta device."""
    with torch.device("meta"):
        net = KLAutoencoder(OFFICIAL).requires_grad_(False)
    with torch.no_grad(), counted(monkeypatch) as live:
        net.decode(torch.empty(batch, 16, grid, grid, device="meta"))
    assert live.peak <= net.decode_bytes(batch, grid, grid) <= 1.5 * live.peak
