"""A toy MAR for statistics: a random transformer and a diffusion head with a known, well-behaved distribution."""

import zlib

import torch
from fastar_nodes.networks.mar import MAR, MARConfig, MARModel
from torch import Tensor, nn

CONFIG = MARConfig(8, 1, 1, 1, buffer=1, tokens=4, channels=2, classes=2, head_depth=1, head_width=8)


class ToyHead(nn.Module):
    """A diffusion head with the interface of ``DiffusionHead`` and no weights; an embedding is (abar, centre).

    Given z, every channel of a token is a mixture of two Gaussians of std ``spread`` at centre - ``apart`` and centre +
    ``apart``, the centre being linear in z. The head returns the exact noise prediction of that mixture. Its variance
    logits depend on the state, so that two models' kernels differ in mean and variance.
    """

    def __init__(self, channels: int, apart: float = 0.8, spread: float = 0.3):
        super().__init__()
        self.channels, self.apart, self.spread = channels, apart, spread
        self.res_blocks = nn.ModuleList()
        f = ((torch.arange(1001, dtype=torch.float64) / 1000 + 0.008) / 1.008 * torch.pi / 2).cos() ** 2
        self.abar = (f[1:] / f[0]).clamp(min=1e-9).float()

    def time_embed(self, t: Tensor) -> Tensor:
        return torch.cat([self.abar[t][:, None], torch.zeros(len(t), self.channels)], 1)

    def cond_embed(self, z: Tensor) -> Tensor:
        return torch.cat([torch.zeros(*z.shape[:-1], 1), 0.8 * z[..., : self.channels]], -1)

    def conditions(self, z: Tensor) -> Tensor:
        return self.cond_embed(z)

    @property
    def modulation_numbers(self) -> int:
        return 1 + self.channels

    def modulations(self, embedding: Tensor) -> list[Tensor]:
        return [embedding]

    def denoise(self, x: Tensor, modulations: list[Tensor]) -> Tensor:
        abar, centre = modulations[0][..., :1], modulations[0][..., 1:]
        root, var = abar.sqrt(), abar * self.spread**2 + 1 - abar
        means = [centre + side * self.apart for side in (-1, 1)]
        weight = torch.softmax(torch.stack([-0.5 * (x - root * m) ** 2 / var for m in means]), 0)
        x0 = sum(w * (m + root * self.spread**2 / var * (x - root * m)) for w, m in zip(weight, means, strict=True))
        return torch.cat([(x - root * x0) / (1 - abar).sqrt(), torch.tanh(x + centre)], -1)


def toy_mar(seed: int = 0, perturbation: float = 0.0) -> MARModel:
    """A toy MAR of 4 tokens of 2 channels; ``perturbation``: std of
    noise on every weight, relative to the std of its initialisation.
    """
    g, other = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1000)
    net = MAR(CONFIG).eval().requires_grad_(False)

    for name, p in net.named_parameters():
        std = 0.5 / p.shape[-1] ** 0.5 if p.ndim == 2 else 0.1
        p.copy_(std * (torch.randn(p.shape, generator=g) + perturbation * torch.randn(p.shape, generator=other)))
        if "norm" in name and name.endswith("weight") or "_ln.weight" in name:
            p.add_(1.0)

    # The tokens decided before a token must have an effect on its centre.
    net.z_proj.weight.mul_(4.0)
    net.diffloss.net = ToyHead(CONFIG.channels)  # type: ignore[assignment]

    return MARModel(net, "toy", latent_scale=0.5, t_max=950)


class ManyImages:
    """Independent noise of many images, one tensor a stream (as
    :class:`samplers.noise.PairedNoise`); tokens are in raster order.
    """

    seed = None  # the key takes its place

    def __init__(self, key: str, images: int):
        self.key, self.images = key, images

    def __len__(self) -> int:
        return self.images

    def _normal(self, stream: str, *shape: int) -> Tensor:
        # torch's CPU generator uses the low 32 bits of a seed, so everything has to be hashed into them.
        g = torch.Generator().manual_seed(zlib.crc32(f"{self.key}/{stream}".encode()))
        return torch.randn(self.images, *shape, generator=g)

    def orders(self, tokens: int) -> Tensor:
        return torch.arange(tokens).expand(self.images, -1)

    def start_noise(self, stream: str, tokens: int, channels: int) -> Tensor:
        return self._normal(f"{stream}/first", tokens, channels)

    def step_noise(self, stream: str, count: int, tokens: int, channels: int) -> Tensor:
        return self._normal(f"{stream}/steps", count, tokens, channels)
