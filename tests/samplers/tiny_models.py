"""Tiny MARs: a random one, quick enough for every test, and one whose head knows the answer, for statistics."""

from __future__ import annotations

from dataclasses import replace

import torch
from fastar_nodes.model_loaders.networks.mar import MAR, MARConfig, MARModel
from fastar_nodes.samplers.mar.loop import Sampled
from torch import Tensor, nn


def tiny_mar(seed: int = 0, tokens: int = 16, heads: int = 2, **shape: int) -> MARModel:
    """A random MAR; ``shape`` changes other fields of its config."""
    config = MARConfig(
        dim=16,
        encoder_depth=2,
        decoder_depth=2,
        heads=heads,
        buffer=2,
        tokens=tokens,
        channels=4,
        classes=5,
        head_depth=2,
        head_width=16,
    )
    config = replace(config, **shape)
    g = torch.Generator().manual_seed(seed)
    net = MAR(config).eval().requires_grad_(False)
    for name, p in net.named_parameters():
        p.copy_(torch.randn(p.shape, generator=g) * (0.5 / max(1, p.shape[-1]) ** 0.5 if p.ndim == 2 else 0.1))
        if "norm" in name and name.endswith("weight") or "_ln.weight" in name:
            p.add_(1.0)
    return MARModel(net, "tiny", latent_scale=0.5, t_max=950)


class ToyHead(nn.Module):
    """The interface of ``DiffusionHead``; an embedding is (abar, centre).

    Given z, every number of a token is of one of two Gaussians around a centre that z says. The head returns the true noise
    for that, and variance logits that depend on the state, so that deviations differ between a draft and the truth.
    """

    def __init__(self, channels: int, off: float, apart: float = 0.8, spread: float = 0.3):
        super().__init__()
        self.channels, self.off, self.apart, self.spread = channels, off, apart, spread
        self.res_blocks = nn.ModuleList()
        steps = torch.arange(1001, dtype=torch.float64) / 1000
        f = ((steps + 0.008) / 1.008 * torch.pi / 2).cos() ** 2
        self.abar = (f[1:] / f[0]).clamp(min=1e-9).float()

    def time_embed(self, t: Tensor) -> Tensor:
        return torch.cat([self.abar[t][:, None], torch.zeros(len(t), self.channels)], 1)

    def cond_embed(self, z: Tensor) -> Tensor:
        return torch.cat([torch.zeros(len(z), 1), 0.8 * z[:, : self.channels] + self.off], 1)

    def modulations(self, embedding: Tensor) -> list[Tensor]:
        return [embedding]

    def denoise(self, x: Tensor, modulations: list[Tensor]) -> Tensor:
        abar, centre = modulations[0][:, :1], modulations[0][:, 1:]
        root, var = abar.sqrt(), abar * self.spread**2 + 1 - abar
        means = [centre + side * self.apart for side in (-1, 1)]
        weight = torch.softmax(torch.stack([-0.5 * (x - root * m) ** 2 / var for m in means]), 0)
        x0 = sum(w * (m + root * self.spread**2 / var * (x - root * m)) for w, m in zip(weight, means, strict=True))
        eps = (x - root * x0) / (1 - abar).sqrt()
        return torch.cat([eps, torch.tanh(x + centre)], 1)


def toy_mar(tokens: int = 4, off: float = 0.0) -> MARModel:
    """A tiny MAR with a :class:`ToyHead`, well-behaved at few diffusion steps; ``off`` shifts the centres, which makes a bad draft."""
    model = tiny_mar(0, tokens)
    model.net.diffloss.net = ToyHead(model.net.config.channels, off)
    # What is known matters: the drafts before a token move its centre.
    model.net.z_proj.weight.mul_(4.0)
    return model


class ManyImages:
    """Noise of a great many images, drawn at once: for statistics, where pairing does not matter."""

    def __init__(self, seed: int, images: int):
        self.seed, self.images = seed, images

    def _draw(self, name: str, *shape: int) -> Tensor:
        g = torch.Generator().manual_seed(1000 * self.seed + sum(map(ord, name)))
        return torch.randn(self.images, *shape, generator=g)

    def orders(self, tokens: int) -> Tensor:
        return torch.arange(tokens).expand(self.images, -1)

    def first(self, stream: str, tokens: int, channels: int) -> Tensor:
        return self._draw(f"{stream}/first", tokens, channels)

    def steps(self, stream: str, count: int, tokens: int, channels: int) -> Tensor:
        return self._draw(f"{stream}/steps", count, tokens, channels)


def pictures(result: Sampled) -> Tensor:
    """Latents as one vector an image, [B, tokens x channels]: what depends on what inside an image is in there."""
    return result.latents.permute(0, 2, 3, 1).flatten(1)
