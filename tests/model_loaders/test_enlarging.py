"""The part of a decoder's file that draws larger images: its network by a plain reference, its files, memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.autoencoders.loader import load_kl, load_vq
from fastar_nodes.model_loaders.bitdance.loader import load_binary
from fastar_nodes.networks.autoencoder import KLAutoencoder, KLConfig, VQAutoencoder, VQConfig, decode_in_chunks
from fastar_nodes.networks.binary import BinaryAutoencoder, BinaryConfig
from fastar_nodes.networks.enlarging import EnlargingConfig, drawn
from live_bytes import counted
from safetensors.torch import save_file
from torch import Tensor

PART = EnlargingConfig(width=6, fine=4, blocks=(0, 2, 1))
# It reads the two lower levels.
RISING = EnlargingConfig(width=6, fine=4, blocks=(0, 2), rises=(5,))
KL = KLConfig(ch=4, ch_mult=(1, 2, 2), blocks=1, z_channels=3, groups=2, enlarging=PART)
VQ = VQConfig(ch=4, ch_mult=(1, 2, 2), blocks=1, z_channels=3, codes=7, code_channels=3, groups=2, enlarging=PART)
BINARY = BinaryConfig(widths=(4, 8, 8), blocks=1, z_channels=3, groups=2, enlarging=PART)
NETS: dict[str, Any] = {
    "kl": (KLAutoencoder, KL, load_kl),
    "vq": (VQAutoencoder, VQ, load_vq),
    "bitdance-ae": (BinaryAutoencoder, BINARY, load_binary),
}


def a_net(kind: str, part: EnlargingConfig = PART) -> Any:
    """An autoencoder with random weights, in its part too."""
    make, config, _ = NETS[kind]
    torch.manual_seed(0)
    return make(replace(config, enlarging=part)).eval().requires_grad_(False)


def a_file(path: Path, state: dict[str, Tensor]) -> Path:
    """A file with the groups of these networks, which no weight states."""
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path, {"groups": "2"})
    return path


def convolved(x: Tensor, state: dict[str, Tensor], name: str) -> Tensor:
    """A 3x3 convolution by sums of shifted products."""
    weight = state[f"enlarge.{name}.weight"]
    _, _, height, width = x.shape
    around = F.pad(x, (1, 1, 1, 1))
    total = state[f"enlarge.{name}.bias"][None, :, None, None].repeat(len(x), 1, height, width)
    for i in range(3):
        for j in range(3):
            window = around[:, :, i : i + height, j : j + width]
            total = total + torch.einsum("oc,bchw->bohw", weight[:, :, i, j], window)

    return total


def shuffled(x: Tensor) -> Tensor:
    """Channel 4 c + 2 i + j at (y, x) becomes channel c at (2 y + i, 2 x + j)."""
    b, channels, height, width = x.shape
    out = x.new_zeros(b, channels // 4, 2 * height, 2 * width)
    for i in range(2):
        for j in range(2):
            out[:, :, i::2, j::2] = x[:, 2 * i + j :: 4]

    return out


def enlarged(part: EnlargingConfig, state: dict[str, Tensor], features: list[Tensor], image: Tensor) -> Tensor:
    """The part, written plainly."""
    x = convolved(features[0], state, "read.0")
    for level, blocks in enumerate(part.blocks):
        if level:
            x = x.repeat_interleave(2, 2).repeat_interleave(2, 3) + convolved(features[level], state, f"read.{level}")
        for block in range(blocks):
            inner = convolved(x.sigmoid() * x, state, f"level.{level}.{block}.conv1")
            x = x + convolved(inner.sigmoid() * inner, state, f"level.{level}.{block}.conv2")

    for i in range(len(part.rises)):
        x = shuffled(convolved(x.sigmoid() * x, state, f"rise.{i}"))

    fine = shuffled(convolved(x.sigmoid() * x, state, "widen"))
    fine = fine.sigmoid() * fine
    smooth = convolved(fine, state, "smooth")
    painted = shuffled(convolved(fine + smooth.sigmoid() * smooth, state, "paint"))
    return painted if part.rises else painted + F.interpolate(image, scale_factor=4, mode="bilinear")


@pytest.mark.parametrize("part", [PART, RISING, EnlargingConfig(6, 4, (1,), (3, 5))])
@pytest.mark.parametrize("kind", NETS)
def test_the_image_is_that_of_the_plain_reference(kind: str, part: EnlargingConfig) -> None:
    net = a_net(kind, part).double()
    read = torch.randn(2, 3, 2, 3, dtype=torch.float64)
    if kind == "bitdance-ae":
        read = read.sign()

    features: list[Tensor] = []
    small = net.decoder.conv_out(net.decoder.climb(read, features))
    assert [tuple(level.shape[2:]) for level in features] == [(2, 3), (4, 6), (8, 12)]
    assert torch.equal(small, net.decoder(read))
    torch.testing.assert_close(drawn(net, read), enlarged(part, net.state_dict(), features, small))


@pytest.mark.parametrize("kind", NETS)
def test_levels_that_the_part_does_not_read_are_not_computed(kind: str) -> None:
    net = a_net(kind, RISING)
    expected = drawn(net, torch.ones(1, 3, 2, 2))
    net.decoder.up[0] = net.decoder.norm_out = net.decoder.conv_out = None
    assert torch.equal(drawn(net, torch.ones(1, 3, 2, 2)), expected)


@pytest.mark.parametrize("part", [PART, RISING])
@pytest.mark.parametrize("kind", NETS)
def test_decoding_enlarges_and_encoding_does_not(kind: str, part: EnlargingConfig) -> None:
    net = a_net(kind, part)
    config = net.config
    assert (config.stride, config.enlarges, config.output_stride) == (4, 4, 16)

    latents = net.encode(torch.rand(2, 3, 8, 12) * 2 - 1)[0]
    assert latents.shape == (2, 3, 2, 3) and net.decode(latents).shape == (2, 3, 32, 48)


@pytest.mark.parametrize("kind", NETS)
def test_without_the_part_the_decoder_is_the_same(kind: str) -> None:
    """Of a file with the part, the other weights decode what they decode without it."""
    make, config, _ = NETS[kind]
    net = a_net(kind)
    plain = make(replace(config, enlarging=None)).eval()
    plain.load_state_dict({name: weight for name, weight in net.state_dict().items() if "enlarge." not in name})
    assert (plain.config.enlarges, plain.config.output_stride) == (1, 4)

    read = torch.randn(1, 3, 2, 2).sign()
    assert torch.equal(plain.decoder(read), net.decoder(read)) and not hasattr(plain, "enlarge")


def test_codes_are_decoded_to_the_size_that_is_encoded() -> None:
    """MuLo-SD decodes and encodes in turn."""
    net = a_net("vq")
    codes = torch.randint(7, (2, 2, 3))
    assert net.decode_codes(codes).shape == (2, 3, 8, 12) and net.decode(net.vectors(codes)).shape == (2, 3, 32, 48)


@pytest.mark.parametrize("part", [PART, RISING])
@pytest.mark.parametrize("kind", NETS)
def test_a_file_with_the_part_loads_and_says_so(kind: str, part: EnlargingConfig, tmp_path: Path) -> None:
    load = NETS[kind][2]
    net = a_net(kind, part)
    model = load(a_file(tmp_path / "own.safetensors", net.state_dict()))
    assert model.net.config == net.config and model.name == "own, enlarges 4 x"

    latents = torch.randn(1, 3, 2, 2)
    assert model.decode(latents).shape == (1, 32, 32, 3)
    torch.testing.assert_close(model.net.decode(latents), net.decode(latents))


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize(
    ("dropped", "sentence"),
    [
        (
            "read.",
            r"holds only some of the part enlarge\.\*, which enlarges images: enlarge\.read\.0\.weight is missing",
        ),
        ("read.2.", r"only some of the part enlarge\.\*, .*: enlarge\.read\.2\.weight is missing"),
        ("smooth.", r"only some of the part enlarge\.\*, .*: enlarge\.smooth\.weight is missing"),
        ("widen.bias", r"1 weight missing \(enlarge\.widen\.bias\)"),
        ("level.1.1.conv2.", r"2 weights missing \(enlarge\.level\.1\.1\.conv2"),
    ],
)
def test_half_of_the_part_is_refused(kind: str, dropped: str, sentence: str, tmp_path: Path) -> None:
    state = {name: w for name, w in a_net(kind).state_dict().items() if not name.startswith(f"enlarge.{dropped}")}
    with pytest.raises(UserError, match=sentence):
        NETS[kind][2](a_file(tmp_path / "own.safetensors", state))


@pytest.mark.parametrize(
    ("part", "added"), [(PART, ["read.3"]), (PART, ["rise.0"]), (RISING, ["rise.1"]), (RISING, ["rise.1", "rise.2"])]
)
def test_the_part_of_another_decoder_is_refused(part: EnlargingConfig, added: list[str], tmp_path: Path) -> None:
    state = a_net("kl", part).state_dict()
    for name in added:
        state |= {f"enlarge.{name}.weight": torch.zeros(8, 4, 3, 3), f"enlarge.{name}.bias": torch.zeros(8)}
    with pytest.raises(UserError, match=r"its part enlarge\.\* is for a decoder of more than 3 levels"):
        load_kl(a_file(tmp_path / "own.safetensors", state))


@pytest.mark.parametrize(("batch", "grid"), [(1, 8), (3, 8), (1, 32)])
@pytest.mark.parametrize(
    "part",
    [
        EnlargingConfig(48, 16, (0, 1, 2, 1)),
        EnlargingConfig(8, 64, (1, 0, 0, 0)),
        EnlargingConfig(96, 2, (0, 0, 0, 1)),
        EnlargingConfig(48, 12, (0, 1, 0), (32,)),
        EnlargingConfig(8, 4, (0, 1), (64, 128)),
        EnlargingConfig(1000, 2, (0, 2), (4, 4)),
    ],
)
def test_decoding_needs_what_is_estimated(
    monkeypatch: pytest.MonkeyPatch, part: EnlargingConfig, batch: int, grid: int
) -> None:
    """Tensors alive at once, on the meta device: of the demo's decoder, and of parts with most channels at their end
    and before it.
    """
    with torch.device("meta"):
        net = KLAutoencoder(KLConfig(32, (1, 1, 2, 2), 1, 8, groups=8, enlarging=part)).requires_grad_(False)
    with torch.no_grad(), counted(monkeypatch) as live:
        net.decode(torch.empty(batch, 8, grid, grid, device="meta"))
    assert live.peak <= net.decode_bytes(batch, grid, grid) <= 1.6 * live.peak


def test_passes_keep_the_images_of_the_passes_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty images, decoded eight at a time where it is no CPU."""
    with torch.device("meta"):
        net = KLAutoencoder(
            KLConfig(32, (1, 1, 2, 2), 1, 8, groups=8, enlarging=EnlargingConfig(8, 4, (0, 1), (64, 128)))
        ).requires_grad_(False)
    with torch.no_grad(), counted(monkeypatch) as live:
        parts = decode_in_chunks(net, torch.empty(40, 8, 8, 8, device="meta"))
    assert [len(part) for part in parts] == [8] * 5
    assert live.peak > net.decode_bytes(8, 8, 8), "a pass alone does not tell"
    assert live.peak <= net.decode_bytes(8, 8, 8) + 32 * net.image_bytes(8, 8) <= 1.6 * live.peak
