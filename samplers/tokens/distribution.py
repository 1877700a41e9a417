"""The distribution of a token, and how a token is sampled from it.

The order is: repetition penalty (:func:`penalised`), temperature, top-k, top-p and ``entropy_temperature``
(:func:`tempered`), and then the sample with Gumbel noise (:func:`gumbel_max`). ``sampling.py`` computes the logits and
calls these functions.

Shapes: B images; n cells; V values of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..noise import CellNoise
from .settings import TokenSampling


def penalised(logits: Tensor, used: Tensor, penalty: float) -> Tensor:
    """Logits after the repetition penalty, fp32 [..., V].

    Source: Keskar et al. 2019 (CTRL), as in Hugging Face transformers. For a value that was sampled before, a positive
    logit is divided by ``penalty``, and a negative logit is multiplied by ``penalty``. A ``penalty`` of 1 changes
    nothing.

    ``logits``: fp32 [..., V]; ``used``: which values were sampled before, bool [..., V].
    """
    lowered = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(used, lowered, logits)


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


def gumbel_max(logits: Tensor, sampling: TokenSampling, noise: CellNoise, cells: Tensor) -> Tensor:
    """Sample tokens, int64 [B, n], for cells, int64 [n] or [B, n], from their logits, fp32 [B, n, V]. The result is the
    value with the largest sum of logit and Gumbel noise (see ``token_noise.py``). At temperature 0, there is no noise.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    return (tempered(logits, sampling) + noise.gumbel(cells)).argmax(-1)
