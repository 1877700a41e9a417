"""A convolutional decoder in strips of rows: the same picture from far less memory at once.

A GroupNorm needs the mean and variance of a whole map, a 3x3 convolution one further row on each side. So the statistics are combined
from all strips first, and every strip then passes through norm, SiLU and convolution alone. Only two maps of full size exist at a time,
the input of a residual block and what lies between its convolutions; the block's output replaces its input. The results differ from
those of whole maps by rounding only: there are no seams, as there are between blended tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Numbers in a strip of one map.
STRIP = 1 << 22


def decode(decoder: Any, z: Tensor, strip: int = STRIP) -> Tensor:
    """The output of ``decoder`` (:class:`.kl.Decoder`) for latents [B, z, h, w], without gradients.

    Args:
        decoder: the network.
        z: its input.
        strip: numbers of a map that are computed at once, roughly; a strip has at least two rows.
    """
    x = decoder.mid(decoder.conv_in(z))
    for level in reversed(decoder.up):
        for i, block in enumerate(level.block):
            x = _residual(block, x, strip)
            if level.attn:
                x = level.attn[i](x)
        if not isinstance(level.upsample, nn.Identity):
            x = _doubled(level.upsample.conv, x, strip)
    return _normed(x, decoder.norm_out, decoder.conv_out, strip)


def _rows(row: int, strip: int) -> int:
    """Rows of a strip, an even number, where a row of the map has ``row`` numbers."""
    return max(2, strip // row // 2 * 2)


def _residual(block: Any, x: Tensor, strip: int) -> Tensor:
    """A residual block; ``x`` may be overwritten."""
    h = _normed(x, block.norm1, block.conv1, strip)
    if not isinstance(block.nin_shortcut, nn.Identity):
        x = block.nin_shortcut(x)
    return _normed(h, block.norm2, block.conv2, strip, add_to=x)


def _normed(x: Tensor, norm: nn.GroupNorm, conv: nn.Conv2d, strip: int, add_to: Tensor | None = None) -> Tensor:
    """conv(SiLU(norm(x))), added to ``add_to`` in place if that is given."""
    scale, shift = _affine(x, norm, strip)

    def part(low: int, high: int) -> Tensor:
        return F.silu(torch.addcmul(shift, x[:, :, low:high], scale))

    return _convolved(part, conv, x, x.shape[2], x.shape[3], strip, add_to)


def _doubled(conv: nn.Conv2d, x: Tensor, strip: int) -> Tensor:
    """conv of x repeated twice along both sides."""

    def part(low: int, high: int) -> Tensor:
        first = low // 2
        twice = F.interpolate(x[:, :, first : (high + 1) // 2], scale_factor=2.0, mode="nearest")
        return twice[:, :, low - 2 * first : high - 2 * first]

    return _convolved(part, conv, x, 2 * x.shape[2], 2 * x.shape[3], strip)


def _convolved(
    part: Callable[[int, int], Tensor],
    conv: nn.Conv2d,
    like: Tensor,
    height: int,
    width: int,
    strip: int,
    add_to: Tensor | None = None,
) -> Tensor:
    """A 3x3 convolution, strip by strip, of a map whose rows low to high - 1 are ``part(low, high)``."""
    out = like.new_empty(len(like), conv.out_channels, height, width) if add_to is None else add_to
    rows = _rows(len(like) * max(conv.in_channels, conv.out_channels) * width, strip)
    for top in range(0, height, rows):
        bottom = min(top + rows, height)
        low, high = max(0, top - 1), min(height, bottom + 1)
        edges = (1, 1, int(top == 0), int(bottom == height))
        y = F.conv2d(F.pad(part(low, high), edges), conv.weight, conv.bias)
        if add_to is None:
            out[:, :, top:bottom] = y
        else:
            out[:, :, top:bottom] += y
    return out


def _affine(x: Tensor, norm: nn.GroupNorm, strip: int) -> tuple[Tensor, Tensor]:
    """Scale and shift [B, C, 1, 1] that a GroupNorm applies to x [B, C, H, W]."""
    batch, channels, height, width = x.shape
    rows = _rows(batch * channels * width, strip)
    counts, means, variances = [], [], []
    for top in range(0, height, rows):
        variance, mean = torch.var_mean(
            x[:, :, top : top + rows].float().reshape(batch, norm.num_groups, -1), -1, correction=0
        )
        counts.append(min(rows, height - top) / height)
        means.append(mean)
        variances.append(variance)
    share = torch.tensor(counts, device=x.device)[:, None, None]
    mean, each = (torch.stack(means) * share).sum(0), torch.stack(means)
    variance = ((torch.stack(variances) + (each - mean).square()) * share).sum(0)
    group = channels // norm.num_groups
    scale = norm.weight.float() * (variance + norm.eps).rsqrt().repeat_interleave(group, 1)
    shift = norm.bias.float() - mean.repeat_interleave(group, 1) * scale
    return scale.to(x.dtype)[..., None, None], shift.to(x.dtype)[..., None, None]


def decode_bytes(config: Any, height: int, width: int, size: int, strip: int = STRIP) -> int:
    """Most bytes of activations that :func:`decode` holds at once, for one picture.

    Args:
        config: :class:`.kl.KLConfig`.
        height, width: of the latents.
        size: bytes of a number.
        strip: as there.
    """
    widths, maps = [config.ch * m for m in config.ch_mult], 0
    for i, (below, above) in enumerate(zip(widths, [*widths[1:], widths[-1]], strict=True)):
        pixels = height * width * (config.stride >> i) ** 2
        # A block that changes the number of channels does not overwrite its input.
        maps = max(maps, pixels * (2 * below + (above if above != below else 0)), pixels * above * 5 // 4)
    middle = 8 * widths[-1] * height * width  # whole maps
    return size * (max(maps, middle) + 6 * strip)
