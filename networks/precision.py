"""What stays in fp32 in a network of 16-bit weights; a test for numbers that are not finite.

From the authors' code; "weights" is the dtype of the weights, fp16 or bf16. Sums of a norm, of a softmax and of a
product are fp32 within one call everywhere, and samplers compute guidance, probabilities, random numbers and diffusion
steps in fp32.

=====================  ======================  ==================================  =====================================
family                 residual stream         further parts in fp32               authors' code
=====================  ======================  ==================================  =====================================
MAR                    fp32                    norms, last layer of the head       autocast to fp16, weights in fp32
Harmon, UniPic         bf16; MAR blocks fp32   norms of MAR, last layer, tokens    all in bf16
LlamaGen, PAR          bf16; fp32 in fp16      RoPE, logits                        ``.to(bf16)``; fp16 is an option
AR-DTok                bf16; fp32 in fp16      logits                              as LlamaGen
Tar, Janus             bf16; fp32 in fp16      RoPE, logits                        transformers in bf16
BitDance               bf16                    position rows, RoPE, predictions    autocast to bf16; rows of tokens fp32
TA-Tok, T5             weights                                                     bf16
VQ, KL autoencoders    fp32 (dtype "auto")     all                                 fp32
=====================  ======================  ==================================  =====================================

- The residual stream is the sum of the outputs of all blocks, so its numbers can exceed 65,504, the largest number of
  fp16. A number within a block may still exceed it; the samplers then refuse the image (``errors.not_finite``).
- bf16 has the range of fp32, so with bf16 the residual stream of token models is bf16, as in the authors' code. An fp32
  stream would cost six operations per block and would not make more images of parallel decoding identical
  (docs/precision.md).
- The blocks of MAR's diffusion head are 16-bit in the authors' code too, by autocast. The head's last layer is fp32
  here but not there, because the first diffusion step multiplies its errors by hundreds (samplers/mar/tables.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)


def is_finite(x: Tensor) -> bool:
    """Whether all values of a tensor of floating-point numbers are finite. The host waits for the device."""
    if x.element_size() == 1:  # most operations do not support fp8
        x = x.float()
    if not x.numel():
        return True

    # It is enough to test the smallest and the largest value, because both are NaN if any value is NaN. They take a
    # tenth of the time of x.isfinite(). aminmax would copy a tensor whose dimensions are not in memory order.
    in_memory_order = sorted(range(x.ndim), key=x.stride, reverse=True)
    least, greatest = x.permute(in_memory_order).aminmax()
    return bool(least.isfinite() & greatest.isfinite())
