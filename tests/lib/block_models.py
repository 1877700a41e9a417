"""Tiny BitDances: random ImageNet models of several blocks, and the recorded text model."""

from functools import cache
from pathlib import Path

import torch
from fastar_nodes.model_loaders.bitdance.loader import load_bitdance
from fastar_nodes.networks.binary import BinaryAutoencoder, BinaryConfig
from fastar_nodes.networks.bitdance import CLASS_HEAD_DIM, BitDanceClass, BitDanceConfig, BlockModel, HeadConfig
from fastar_nodes.networks.llama import CLASS
from safetensors.torch import save_file
from tiny_models import drawn

BINARY = BinaryConfig(widths=(32, 32), blocks=1, z_channels=6)
FOLDER = Path(__file__).resolve().parents[1] / "parity" / "bitdance"


def tiny_bitdance(block: int = 4, seed: int = 0, grid: int = 4, channels: int = 6) -> BlockModel:
    """A random ImageNet model of five classes, with blocks of so many tokens."""
    config = BitDanceConfig(
        dim=32,
        depth=2,
        heads=2,
        kv_heads=2,
        hidden=48,
        vocab=0,
        condition=CLASS,
        condition_size=5,
        tied=True,
        eps=1e-6,
        rows=3,
        block=block,
        tokens=grid**2,
    )
    head = HeadConfig(
        channels=channels,
        condition=32,
        width=64,
        depth=2,
        modulations=1,
        heads=64 // CLASS_HEAD_DIM if block > 1 else 0,
        bounded=True,
    )
    net = drawn(BitDanceClass(config, head), seed, 1.0, 0.1)
    net.cls_embedding.weight.mul_(5.0)
    return BlockModel(net, "tiny", stride=2)


def one_file(path: Path, seed: int = 0, **metadata: str) -> Path:
    """A random ImageNet model with its autoencoder inside."""
    model = tiny_bitdance(seed=seed)
    vae = drawn(BinaryAutoencoder(BINARY), seed, 0.1, 0.1).state_dict()
    state = {**model.net.state_dict(), **{f"vae.{name}": tensor for name, tensor in vae.items()}}
    save_file(state, path, metadata={"heads": "2", "bounded": "1", **metadata})
    return path


@cache
def text_bitdance() -> BlockModel:
    """The recorded text model, in fp32."""
    return load_bitdance(FOLDER / "native", "fp32")


def bits(images: int, model: BlockModel, grid: tuple[int, int], seed: int = 3) -> torch.Tensor:
    """Random latents [images, C, h, w]."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (images, model.net.channels, *grid), generator=g).float() * 2 - 1
