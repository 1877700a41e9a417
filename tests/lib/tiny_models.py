"""Tiny MARs: a random one, quick enough for every test, and one whose head knows the answer, for statistics."""

from dataclasses import replace

import torch
from fastar_nodes.networks.mar import MAR, MARConfig, MARModel
from torch import Tensor, nn
from toy_models import ToyHead


def tiny_mar(seed: int = 0, tokens: int = 16, heads: int = 2, **shape: int) -> MARModel:
    """A random MAR; ``shape`` changes other fields of its config."""
    config = MARConfig(16, 2, 2, heads, 2, tokens, 4, 5, 2, 16)
    config = replace(config, **shape)
    return MARModel(drawn(MAR(config), seed, 0.5, 0.1), "tiny", latent_scale=0.5, t_max=950)


def drawn(net: nn.Module, seed: int, matrix: float, vector: float) -> nn.Module:
    """The network with random weights of these scales; those of norms lie around 1."""
    g = torch.Generator().manual_seed(seed)
    for name, p in net.eval().requires_grad_(False).named_parameters():
        p.copy_(torch.randn(p.shape, generator=g) * (matrix / max(1, p.shape[-1]) ** 0.5 if p.ndim == 2 else vector))
        if "norm" in name and name.endswith("weight") or "_ln.weight" in name:
            p.add_(1.0)
    return net


class Shifted(ToyHead):
    """A toy head whose centres are ``off``, which makes a bad draft."""

    def __init__(self, channels: int, off: float):
        super().__init__(channels)
        self.off = off

    def cond_embed(self, z: Tensor) -> Tensor:
        return super().cond_embed(z) + torch.tensor([0.0] + [self.off] * self.channels)


def toy_mar(tokens: int = 4, off: float = 0.0) -> MARModel:
    """A tiny MAR with a head that is well-behaved at few diffusion steps."""
    model = tiny_mar(0, tokens)
    model.net.diffloss.net = Shifted(model.net.config.channels, off)
    # What is known matters: the drafts before a token move its centre.
    model.net.z_proj.weight.mul_(4.0)
    return model
