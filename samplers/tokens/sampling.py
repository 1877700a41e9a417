"""From the transformer's hidden rows to tokens: logits, guidance, and sampling with paired noise.

The file has, in this order:

1. to which passes and tokens guidance is applied (:class:`Guidance`);
2. :class:`TokenDraw`, which samples the tokens in a generation. :meth:`TokenDraw.of_schedule` is the *draw* of
   ``engine.py``;
3. :func:`tokens_from_hidden`, which does the work and may be recorded as a CUDA graph. It calls :func:`guided_logits`,
   and then :func:`tokens_from_logits`;
4. the steps of :func:`tokens_from_logits`: the repetition penalty (:func:`penalised`), and the sample with Gumbel noise
   (:func:`gumbel_max`) from the distribution after temperature, top-k, top-p and ``entropy_temperature``
   (:func:`tempered`).

Shapes: B images of L cells; R batch rows, one for each image in each branch (see :class:`.PreparedCondition`); n cells
of a pass; D channels of a hidden row; V values of a token. The tokens of the images are int64 [B, L + 1], because the
last entry is for padding (see :class:`.TokenCanvas`).
"""

from __future__ import annotations

import math
from copy import copy
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...networks.llama import Llama
from ...networks.speed import recorded
from ...networks.torch_state import to_device
from ..engine import Draw
from ..noise import CellNoise
from .canvas import TokenCanvas
from .schedule import Schedule
from .settings import TokenSampling
from .token_noise import TokenNoise


class Guidance(NamedTuple):
    """Whether classifier-free guidance is applied to the tokens of a pass."""

    applies: bool  # if False, guidance is applied to no token
    # If ``applies``, the tokens to which guidance is applied: bool [n] or [B, n]; None: all tokens.
    per_token: Tensor | None = None


def guidance_at(sampling: TokenSampling, cfg_steps: Tensor) -> Guidance:
    """The guidance of tokens. ``cfg_steps``: the ``cfg_step`` of each token, int64 [...], with the same meaning as
    the ``cfg_step`` of a :class:`.Pass`.
    """
    if sampling.cfg_interval == math.inf:
        return Guidance(sampling.uses_guidance)  # the same for all tokens
    return Guidance(sampling.uses_guidance, sampling.in_cfg_interval(cfg_steps))


def guided_passes(sampling: TokenSampling, schedule: Schedule) -> list[bool]:
    """For each pass of a schedule, whether guidance is applied."""
    return [sampling.uses_guidance and sampling.in_cfg_interval(p.cfg_step) for p in schedule.passes]


class DrawSetup(NamedTuple):
    """The inputs of a draw that are the same in all passes of a generation."""

    sampling: TokenSampling
    images: int  # B
    cell_noise: CellNoise  # the random numbers from which the draw samples
    fixed_tokens: Tensor | None = None  # int64 [B, L + 1], see TokenCanvas; None without an edit
    span: tuple[int, int] | None = None  # half-open range of the token values that are image codes; None: all values
    penalty: float = 1.0  # repetition penalty; at 1, there is no penalty
    part_share: float = 0.0  # share of the second branch, see PreparedCondition
    # Number of rows per image to which hidden rows are padded; 0: no padding. With padding, every pass rounds in the
    # same way; see one_shape in networks/llama.py.
    padded_to: int = 0


class TokenDraw:
    """Samples tokens of B images from the hidden rows that predict them.

    Args:
        canvas: the images.
        stream: name of the stream of random numbers, see :class:`.TokenNoise`.
        span, penalty, part_share, padded_to: see :class:`DrawSetup`.
    """

    def __init__(
        self,
        canvas: TokenCanvas,
        stream: str = "token",
        *,
        span: tuple[int, int] | None = None,
        penalty: float = 1.0,
        part_share: float = 0.0,
        padded_to: int = 0,
    ) -> None:
        self.canvas = canvas
        self.net = canvas.model.net
        self.stream = stream
        self.noise: TokenNoise = canvas.noise
        low, high = span or (0, self.net.config.vocab)
        self.value_count = high - low  # number of values that a token may have
        self.setup = DrawSetup(
            sampling=canvas.sampling,
            images=len(self.noise),
            cell_noise=self.noise.stream(stream, self.value_count, canvas.device),
            fixed_tokens=canvas.fixed_tokens,
            span=span,
            penalty=penalty,
            part_share=part_share,
            padded_to=padded_to,
        )

    def of_schedule(self, schedule: Schedule) -> Draw:
        """The draw of :func:`.engine.run_passes` for a schedule: a function of a pass k, the n cells of the pass, and
        the hidden rows that predict these cells, [R, n, D]. The function returns the cells' tokens, int64 [B, n].
        """
        guided = guided_passes(self.canvas.sampling, schedule)

        def draw_pass(k: int, cells: Tensor, hidden: Tensor) -> Tensor:
            return self.tokens(hidden, Guidance(guided[k]), cells, self.canvas.values)

        return draw_pass

    def tokens(self, hidden: Tensor, guidance: Guidance, cells: Tensor, so_far: Tensor) -> Tensor:
        """Sample tokens, int64 [B, n], for cells.

        Args:
            hidden: the hidden rows that predict the cells, [R, n, D].
            guidance: the guidance of these cells.
            cells: int64 [n], or [B, n] if the images have different cells.
            so_far: all tokens of the images so far, int64 [B, L + 1], for the repetition penalty.
        """
        # A recorded function copies all its arguments. If there is no penalty, None saves the copy.
        so_far_if_penalised = so_far if self.setup.penalty != 1 else None
        new = tokens_from_hidden(self.net, self.setup, hidden, guidance, cells, so_far_if_penalised)
        self.canvas.watch(*new.norms)
        return new.tokens

    def logits(self, hidden: Tensor, guidance: Guidance) -> Tensor:
        """The logits of hidden rows [R, n, D] after classifier-free guidance, fp32 [B, n, V]."""
        result = guided_logits(self.net, self.setup, hidden, guidance)
        self.canvas.watch(*result.norms)
        return result.logits

    def for_images(self, images: np.ndarray) -> TokenDraw:
        """The draw for some of the B images. ``images``: the indices of these images, int64 [A]."""
        some = copy(self)
        some.noise = self.noise.of(images.tolist())
        cell_noise = some.noise.stream(self.stream, self.value_count, self.canvas.device)
        fixed_tokens = self.setup.fixed_tokens
        if fixed_tokens is not None:
            fixed_tokens = fixed_tokens[to_device(images, fixed_tokens.device)]
        some.setup = self.setup._replace(images=len(images), cell_noise=cell_noise, fixed_tokens=fixed_tokens)
        return some


class Norms(NamedTuple):
    """The norms of a draw, fp32 [] each. If a value is not finite, the norm of its tensor is not finite."""

    logits: Tensor
    hidden: Tensor


class NewTokens(NamedTuple):
    """The result of :func:`tokens_from_hidden`."""

    tokens: Tensor  # int64 [B, n]
    norms: Norms


class GuidedLogits(NamedTuple):
    """The result of :func:`guided_logits`."""

    logits: Tensor  # fp32 [B, n, V]
    norms: Norms


@recorded
def tokens_from_hidden(
    net: Llama,
    setup: DrawSetup,
    hidden: Tensor,
    guidance: Guidance,
    cells: Tensor,
    so_far: Tensor | None,
) -> NewTokens:
    """Sample tokens from the hidden rows that predict them.

    For the arguments see :func:`guided_logits` and :func:`tokens_from_logits`.
    """
    result = guided_logits(net, setup, hidden, guidance)
    return NewTokens(tokens_from_logits(setup, result.logits, cells, so_far), result.norms)


def guided_logits(net: Llama, setup: DrawSetup, hidden: Tensor, guidance: Guidance) -> GuidedLogits:
    """Apply guidance to the logits of ``hidden`` rows, [R, n, D]."""
    # 1. The logits of all branches. The first branch reads the condition. There may be a branch that reads a part of
    #    the condition, and a branch that reads the null condition.
    cell_count = hidden.shape[1]
    padded = F.pad(hidden, (0, 0, 0, setup.padded_to - cell_count)) if setup.padded_to else hidden
    branches = net.logits(padded, setup.span)[:, :cell_count].split(setup.images)

    # 2. The logits of the condition, mixed with the logits of the part.
    mixed = branches[0]
    conditional_branches = 1
    if setup.part_share:
        mixed = torch.lerp(mixed, branches[1], setup.part_share)
        conditional_branches = 2

    # 3. Classifier-free guidance: null + cfg (cond - null). A pass without guidance may feed the null branch too,
    #    because a later pass with guidance reads its keys and values. A pass with guidance always feeds it.
    if guidance.applies:
        assert len(branches) == conditional_branches + 1, "guidance needs the null branch, but it was not fed"
        cond = mixed
        mixed = torch.lerp(branches[-1], cond, setup.sampling.cfg)
        if guidance.per_token is not None:
            mixed = torch.where(guidance.per_token[..., None], mixed, cond)

    # The norm of the logits is computed here, because top-k and top-p later set logits to -inf on purpose. The norm of
    # the hidden rows shows a further fault: if the sum of the squares of a row overflows, the norm is infinite. RMSNorm
    # has then turned the row into zeros, so the logits are finite, but wrong.
    norms = Norms(torch.linalg.vector_norm(mixed, torch.inf), torch.linalg.vector_norm(hidden.float()))
    return GuidedLogits(mixed, norms)


def tokens_from_logits(setup: DrawSetup, logits: Tensor, cells: Tensor, so_far: Tensor | None) -> Tensor:
    """Sample tokens, int64 [B, n], for cells.

    Args:
        setup: the inputs that are the same in all passes.
        logits: the logits of the cells, fp32 [B, n, V].
        cells: int64 [n], or [B, n] if the images have different cells.
        so_far: all tokens of the images so far, int64 [B, L + 1]; None if there is no repetition penalty.
    """
    # 1. The repetition penalty.
    if so_far is not None:
        logits = penalised(logits, used_before(so_far, cells, logits.shape[-1]), setup.penalty)

    # 2. Apply temperature, top-k and top-p. Then take the value with the largest sum of logit and Gumbel noise.
    new = gumbel_max(logits, setup.sampling, setup.cell_noise, cells)

    # 3. In an edit, the fixed tokens replace the sampled tokens of their cells.
    if setup.fixed_tokens is None:
        return new
    fixed = setup.fixed_tokens[:, cells] if cells.ndim == 1 else setup.fixed_tokens.gather(1, cells)
    return torch.where(fixed >= 0, fixed, new)


def used_before(tokens: Tensor, cells: Tensor, values: int) -> Tensor:
    """For each cell of ``cells``, which token values occur before the cell in raster order, bool [B, n, values].

    Args:
        tokens: the tokens of the images so far, int64 [B, L + 1], including guesses (``jacobi.py``).
        cells: int64 [n], or [B, n] if the images have different cells.
        values: number of values of a token.
    """
    of_image = tokens[:, None, :-1]  # [B, 1, L], without the last entry, which is for padding
    # For each of ``cells``, which cells of the image come before it, bool [B, n, L].
    is_before = (torch.arange(of_image.shape[2], device=cells.device) < cells[..., None]).expand(len(of_image), -1, -1)

    # How often each value occurs before the cell, [B, n, values].
    count = torch.zeros(*is_before.shape[:2], values, dtype=torch.int32, device=cells.device)
    count.scatter_add_(2, of_image.expand_as(is_before), is_before.to(count.dtype))
    return count > 0


def penalised(logits: Tensor, used: Tensor, penalty: float) -> Tensor:
    """Logits after the repetition penalty, fp32 [..., V].

    Source: Keskar et al. 2019 (CTRL), as in Hugging Face transformers. For a value that was sampled before, a positive
    logit is divided by ``penalty``, and a negative logit is multiplied by ``penalty``. A ``penalty`` of 1 changes
    nothing.

    ``logits``: fp32 [..., V]; ``used``: which values were sampled before, bool [..., V].
    """
    lowered = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(used, lowered, logits)


def gumbel_max(logits: Tensor, sampling: TokenSampling, noise: CellNoise, cells: Tensor) -> Tensor:
    """Sample tokens, int64 [B, n], for cells, int64 [n] or [B, n], from their logits, fp32 [B, n, V]. The result is the
    value with the largest sum of logit and Gumbel noise (see ``token_noise.py``). At temperature 0, there is no noise.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    return (tempered(logits, sampling) + noise.gumbel(cells)).argmax(-1)


def tempered(logits: Tensor, sampling: TokenSampling) -> Tensor:
    """Apply temperature, top-k, top-p and ``entropy_temperature``. Returns the logits of the distribution from which
    tokens are sampled, fp32 [..., V]. ``logits``: after guidance, fp32 [..., V].

    At temperature 0, the likeliest value has probability 1.
    """
    if sampling.temperature == 0:
        likeliest = logits.argmax(-1, keepdim=True)
        return torch.full_like(logits, -torch.inf).scatter_(-1, likeliest, 0.0)

    scaled = logits if sampling.temperature == 1 else logits / max(sampling.temperature, 1e-5)
    scaled = allowed(scaled, sampling.top_k, sampling.top_p)
    if sampling.entropy_temperature == 0:
        return scaled

    # The entropy is computed over the values that may be sampled, from the logits before any temperature.
    untempered = logits.masked_fill(scaled.isneginf(), -torch.inf)
    return scaled / entropy_factor(untempered, sampling.entropy_temperature)


def allowed(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Set the logits of values that may not be sampled to -inf. ``logits``: fp32 [..., V].

    Top-k keeps the k largest logits, and all logits that are equal to the smallest of these k. If ``top_k`` is 0, all
    logits are kept. Then top-p (Holtzman et al. 2019) keeps the likeliest values, as few as are needed for a total
    probability above ``top_p``. If ``top_p`` is 1, all values are kept.
    """
    values = logits.shape[-1]
    if 0 < top_k < values:
        least = logits.topk(top_k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
        logits = logits.masked_fill(logits < least, -torch.inf)

    if top_p < 1.0:
        ordered, index = logits.sort(dim=-1, descending=True)
        beyond = ordered.softmax(-1).cumsum(-1) > top_p
        # Keep the first value with which the sum is above top_p.
        beyond = torch.cat([torch.zeros_like(beyond[..., :1]), beyond[..., :-1]], dim=-1)
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, index, beyond), -torch.inf)
    return logits


def entropy_factor(logits: Tensor, strength: float) -> Tensor:
    """The factor by which the temperature is multiplied, fp32 [..., 1]. The factor depends on H, the entropy in nats of
    the token's distribution. ``logits``: the logits of this distribution, fp32 [..., V].

    Source: Ma et al. 2025, "Towards Better & Faster Autoregressive Image Generation: From the Perspective of Entropy"
    (NeurIPS 2025, arXiv 2510.09012), equation 2 with the constants for LlamaGen: 2.5 exp(-H / 3) + 0.6. This factor
    adds randomness where the model is certain (3.1 at H = 0), and removes randomness where the model is uncertain
    (below 1 if H is above 5.5).

    Where the paper leaves a choice open, FastAR follows the published code: H is the entropy after guidance, top-k and
    top-p, but before the temperature. FastAR differs from that code in one point: FastAR applies top-p after the
    temperature, as LlamaGen does. At a temperature other than 1, top-p may therefore keep other values.

    ``strength``: at 1, the result is the factor of the paper; at 0, the result is 1 for every distribution. Between 0
    and 1, the factor is interpolated linearly. The paper has no setting for the strength.
    """
    entropy = torch.special.entr(logits.softmax(-1)).sum(-1, keepdim=True)

    published = 2.5 * torch.exp(-entropy / 3) + 0.6
    return 1 + strength * (published - 1)
