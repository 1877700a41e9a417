"""MAR's diffusion head as two Triton kernels a residual block and one for the last layer, for few rows.

With few rows a diffusion step lasts as long as its launches: 27 kernels as torch.compile generates them, 13 here for MAR-B's six blocks.
Every program of a kernel normalises its rows itself, which repeats little work for few rows; the input projection is computed where its
output is read. Sums are fp32. This module imports Triton; nothing imports it unless ``speed`` is "kernels".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from .diffusion_head import DiffusionHead

# Rows that a program computes, the columns of its part of the output, and the numbers of a row read at once.
_ROWS, _COLUMNS, _READ = 16, 32, 64


@triton.jit
def _stream(x, weight, bias, r, c, rows, width, channels, C: tl.constexpr, PROJECT: tl.constexpr):
    """Part of the residual stream, fp32 [r, c]: read from ``x`` [rows, width], or the projection of tokens ``x`` [rows, channels]."""
    inside = (r[:, None] < rows) & (c[None, :] < width)
    if PROJECT:
        n = tl.arange(0, C)
        token = tl.load(x + r[:, None] * channels + n[None, :], (r[:, None] < rows) & (n[None, :] < channels), 0.0)
        w = tl.load(weight + c[None, :] * channels + n[:, None], (n[:, None] < channels) & (c[None, :] < width), 0.0)
        part = tl.dot(token.to(w.dtype), w, input_precision="ieee")
        part += tl.load(bias + c, c < width, 0.0).to(tl.float32)[None, :]
        # The stream has the dtype of the weights.
        return tl.where(inside, part.to(w.dtype).to(tl.float32), 0.0)
    return tl.load(x + r[:, None] * width + c[None, :], inside, 0.0).to(tl.float32)


@triton.jit
def _normalise(
    x,
    w_in,
    b_in,
    r,
    rows,
    width,
    channels,
    eps,
    R: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    PROJECT: tl.constexpr,
):
    """Mean and reciprocal standard deviation of rows of the stream, fp32 [R] each."""
    total = tl.zeros((R,), tl.float32)
    for k in range(0, width, K):
        c = k + tl.arange(0, K)
        total += tl.sum(_stream(x, w_in, b_in, r, c, rows, width, channels, C, PROJECT), 1)
    mean = total / width
    squares = tl.zeros((R,), tl.float32)
    for k in range(0, width, K):
        c = k + tl.arange(0, K)
        d = _stream(x, w_in, b_in, r, c, rows, width, channels, C, PROJECT) - mean[:, None]
        squares += tl.sum(tl.where(c[None, :] < width, d * d, 0.0), 1)
    return mean, 1.0 / tl.sqrt(squares / width + eps)


@triton.jit
def _normalised_product(
    x, w_in, b_in, shift, scale, weight, bias, out,
    rows, width, columns, channels, eps,
    R: tl.constexpr, N: tl.constexpr, K: tl.constexpr, C: tl.constexpr, PROJECT: tl.constexpr, ACTIVATE: tl.constexpr,
):  # fmt: skip
    """out [rows, columns] = f((LN(x) * scale + shift) weight^T + bias), with f = SiLU or the identity."""
    r, c = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1) * N + tl.arange(0, N)
    mean, factor = _normalise(x, w_in, b_in, r, rows, width, channels, eps, R, K, C, PROJECT)
    sums = tl.zeros((R, N), tl.float32)
    for k in range(0, width, K):
        i = k + tl.arange(0, K)
        inside = (r[:, None] < rows) & (i[None, :] < width)
        at = r[:, None] * width + i[None, :]
        a = (_stream(x, w_in, b_in, r, i, rows, width, channels, C, PROJECT) - mean[:, None]) * factor[:, None]
        a = a * tl.load(scale + at, inside, 0.0).to(tl.float32) + tl.load(shift + at, inside, 0.0).to(tl.float32)
        w = tl.load(weight + c[None, :] * width + i[:, None], (c[None, :] < columns) & (i[:, None] < width), 0.0)
        sums += tl.dot(tl.where(inside, a, 0.0).to(w.dtype), w, input_precision="ieee")
    sums += tl.load(bias + c, c < columns, 0.0).to(tl.float32)[None, :]
    if ACTIVATE:
        sums = sums * tl.sigmoid(sums)
    tl.store(
        out + r[:, None] * columns + c[None, :],
        sums.to(out.dtype.element_ty),
        (r[:, None] < rows) & (c[None, :] < columns),
    )


@triton.jit
def _gated_product(
    h, x, w_in, b_in, gate, weight, bias, out,
    rows, width, channels,
    R: tl.constexpr, N: tl.constexpr, K: tl.constexpr, C: tl.constexpr, PROJECT: tl.constexpr,
):  # fmt: skip
    """out [rows, width] = x + gate * (h weight^T + bias)."""
    r, c = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1) * N + tl.arange(0, N)
    sums = tl.zeros((R, N), tl.float32)
    for k in range(0, width, K):
        i = k + tl.arange(0, K)
        a = tl.load(h + r[:, None] * width + i[None, :], (r[:, None] < rows) & (i[None, :] < width), 0.0)
        w = tl.load(weight + c[None, :] * width + i[:, None], (c[None, :] < width) & (i[:, None] < width), 0.0)
        sums += tl.dot(a, w, input_precision="ieee")
    sums += tl.load(bias + c, c < width, 0.0).to(tl.float32)[None, :]
    inside = (r[:, None] < rows) & (c[None, :] < width)
    at = r[:, None] * width + c[None, :]
    stream = _stream(x, w_in, b_in, r, c, rows, width, channels, C, PROJECT)
    sums = stream + tl.load(gate + at, inside, 0.0).to(tl.float32) * sums
    tl.store(out + at, sums.to(out.dtype.element_ty), inside)


def _launch(kernel: Any, rows: int, columns: int, *arguments: Any, **constants: Any) -> None:
    """Run a kernel over an output [rows, columns]."""
    grid = (triton.cdiv(rows, _ROWS), triton.cdiv(columns, _COLUMNS))
    kernel[grid](*arguments, R=_ROWS, N=_COLUMNS, K=_READ, **constants)


def denoise(head: DiffusionHead, x: Tensor, modulations: list[Tensor]) -> Tensor:
    """One evaluation of the head; see ``DiffusionHead.denoise``, from which results differ by rounding.

    Args:
        head: its weights are on the device.
        x: noisy tokens fp32 [N, channels].
        modulations: [N, w] each; see ``DiffusionHead.modulations``.

    Returns:
        fp32 [N, 2 channels].
    """
    rows, channels = x.shape
    first, final = head.input_proj, head.final_layer
    width = first.weight.shape[0]
    parts = [m.contiguous() for m in modulations]
    stream, tokens = x.contiguous(), max(16, triton.next_power_of_2(channels))
    inner = x.new_empty(rows, width, dtype=first.weight.dtype)
    for i, block in enumerate(head.res_blocks):
        shift, scale, gate = parts[3 * i : 3 * i + 3]
        into, out_of = block.mlp[0], block.mlp[2]
        own = (first.weight, first.bias)
        same = {"C": tokens, "PROJECT": i == 0}
        _launch(
            _normalised_product, rows, width,
            stream, *own, shift, scale, into.weight, into.bias, inner, rows, width, width, channels, block.in_ln.eps,
            ACTIVATE=True, **same,
        )  # fmt: skip
        # In place after the first block: a program reads and writes the same numbers of the stream.
        target = stream if i else torch.empty_like(inner)
        _launch(
            _gated_product, rows, width,
            inner, stream, *own, gate, out_of.weight, out_of.bias, target, rows, width, channels, **same,
        )  # fmt: skip
        stream = target
    out = x.new_empty(rows, len(final.linear.weight))
    _launch(
        _normalised_product, rows, out.shape[1],
        stream, first.weight, first.bias, *parts[-2:], final.linear.weight, final.linear.bias, out,
        rows, width, out.shape[1], channels, final.norm_final.eps,
        ACTIVATE=False, C=tokens, PROJECT=not head.res_blocks,
    )  # fmt: skip
    return out
