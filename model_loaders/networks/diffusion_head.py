"""MAR's diffusion head: an MLP that predicts the noise of a token, modulated by time and condition."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .ops import Linear, linear

# Most rows whose normalisation and modulation are one operation on a CPU; beyond, two vectorised ones are faster.
_FUSED_ROWS = 16

# Modulations of the head that are computed at once, in numbers; those of one diffusion step may be more.
BUDGET = 1 << 24


def modulated(x: Tensor, shift: Tensor, scale: Tensor, eps: float = 1e-6) -> Tensor:
    """LN(x) * scale + shift of rows x [R, w], with shift and scale [R, w] of their own.

    For few rows one group normalisation: every row is a group, and every number of it a channel.
    """
    rows, width = x.shape
    cpu = x.device.type == "cpu"
    whole = torch.is_grad_enabled() or torch.compiler.is_compiling() or cpu and rows > _FUSED_ROWS
    if whole or not (shift.is_contiguous() and scale.is_contiguous()):
        return torch.addcmul(shift, F.layer_norm(x, (width,), eps=eps), scale)
    count = rows * width
    # The CPU's kernel for channels in the last place is the faster one; with one pixel both orders are the same memory.
    flat = x.as_strided((1, count, 1, 1), (count, 1, count, count)) if cpu else x.view(1, count, 1)
    return torch.native_group_norm(flat, scale.view(-1), shift.view(-1), 1, count, 1, rows, eps)[0].view(rows, width)


class HeadBlock(nn.Module):
    """Residual MLP block modulated by time and condition (adaLN): x + gate * MLP(LN(x) (1 + scale) + shift)."""

    def __init__(self, width: int):
        super().__init__()
        self.in_ln = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(Linear(width, width, bias=True), nn.SiLU(), Linear(width, width, bias=True))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), Linear(width, 3 * width, bias=True))

    def modulation(self, active: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Shift, scale and gate [..., w] of an activated embedding [..., w], with the LayerNorm's weight and bias in them."""
        shift, scale, gate = _parts(self.adaLN_modulation[1], active, 3)
        weight, bias = self.in_ln.weight, self.in_ln.bias
        if torch.is_grad_enabled():
            return torch.addcmul(shift, bias, 1 + scale), weight * (1 + scale), gate
        shift.addcmul_(bias, scale.add_(1))
        return shift, scale.mul_(weight), gate

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        """x [N, w] with a row of :meth:`modulation` each."""
        return torch.addcmul(x, gate, self.branch(x, shift, scale))

    def branch(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        """MLP output [N, w]; the block adds gate times it to x."""
        return self.mlp(modulated(x, shift, scale))


def _parts(layer: nn.Module, x: Tensor, count: int) -> list[Tensor]:
    """A linear layer's output in equal parts, each contiguous."""
    if not isinstance(layer, nn.Linear):  # int8: activations are rounded once
        return [part.contiguous() for part in layer(x).chunk(count, -1)]
    pairs = zip(layer.weight.chunk(count), layer.bias.chunk(count), strict=True)
    return [linear(x, weight, bias) for weight, bias in pairs]


class _Final(nn.Module):
    def __init__(self, width: int, out: int):
        super().__init__()
        self.norm_final = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.linear = Linear(width, out, bias=True)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), Linear(width, 2 * width, bias=True))

    def modulation(self, active: Tensor) -> tuple[Tensor, Tensor]:
        """Shift and scale [..., w] of an activated embedding [..., w]."""
        shift, scale = _parts(self.adaLN_modulation[1], active, 2)
        return shift, 1 + scale

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        # The last layer stays in fp32: at t = 999 its errors are multiplied by hundreds (samplers/mar/tables.py).
        return self.linear(modulated(x, shift, scale).to(self.linear.weight.dtype))


class _TimeEmbedding(nn.Module):
    def __init__(self, width: int, frequencies: int = 256):
        super().__init__()
        self.frequencies = frequencies
        self.mlp = nn.Sequential(Linear(frequencies, width, bias=True), nn.SiLU(), Linear(width, width, bias=True))

    def forward(self, t: Tensor) -> Tensor:
        half = self.frequencies // 2
        rates = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32, device=t.device) / half)
        angles = t[:, None].float() * rates
        return self.mlp(torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.mlp[0].weight.dtype))


class DiffusionHead(nn.Module):
    """MAR's per-token denoiser (SimpleMLPAdaLN): noisy token, timestep and condition z to noise and variance logits."""

    def __init__(self, channels: int, width: int, depth: int, z_channels: int):
        super().__init__()
        self.channels = channels
        self.time_embed = _TimeEmbedding(width)
        self.cond_embed = Linear(z_channels, width, bias=True)
        self.input_proj = Linear(channels, width, bias=True)
        self.res_blocks = nn.ModuleList(HeadBlock(width) for _ in range(depth))
        self.final_layer = _Final(width, 2 * channels)

    def modulations(self, embedding: Tensor) -> list[Tensor]:
        """adaLN modulations: embedding [..., w] to tensors [..., w], three for each block (shift, scale, gate) and two for the
        last layer.

        The embedding is ``time_embed(t) + cond_embed(z)``. Nothing here depends on the noisy token, so a sampler can
        compute the modulations of many diffusion steps in one matrix product: most of the head's weights are then read
        once and not once a step.
        """
        active = F.silu(embedding)
        return [part for layer in (*self.res_blocks, self.final_layer) for part in layer.modulation(active)]

    def denoise(self, x: Tensor, modulations: Sequence[Tensor]) -> Tensor:
        """One evaluation.

        Args:
            x: noisy tokens [N, channels], fp32.
            modulations: from :meth:`modulations`, one row a token.

        Returns:
            [N, 2 channels] fp32: predicted noise, then variance logits (-1..1 between the two bounds).
        """
        h = self.input_proj(x.to(self.input_proj.weight.dtype))
        for i, block in enumerate(self.res_blocks):
            h = block(h, *modulations[3 * i : 3 * i + 3])
        return self.final_layer(h, *modulations[-2:])

    def forward(self, x: Tensor, t: Tensor, z: Tensor) -> Tensor:
        """x [N, channels], t [N] in 0..999, z [N, z_channels] to [N, 2 channels]."""
        return self.denoise(x, self.modulations(self.time_embed(t) + self.cond_embed(z)))
