"""A Janus answers a question about images: word after word, greedily or drawn, up to the end token.

Source: the published code of Janus (Wu et al. 2024, arXiv 2410.13848; Chen et al. 2025, arXiv 2501.17811), whose
``inference.py`` is greedy and whose demo draws at temperature 0.1 from the likeliest words that reach 0.95 together.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError, not_finite
from ..networks.janus import JanusModel, WordHead
from ..networks.llama import Positions, cache_bytes
from ..networks.precision import is_finite
from ..networks.torch_state import in_own_state
from ..samplers.settings import Settings, knob
from ..samplers.tokens.sampling import gumbel_max
from ..samplers.tokens.settings import TokenSampling
from ..samplers.tokens.token_noise import TokenNoise
from .families import families

# The demo's share of probability, of drawn words.
TOP_P = 0.95
# Buffers of a row of logits while a word is drawn, and of a fed row in a block, see runs/memory/tokens.py.
_LOGITS = 10
_ROWS = 16


@dataclass(frozen=True)
class AnswerSettings(Settings):
    """How a question is answered."""

    limit: int = knob(
        512,
        "Largest number of tokens of an answer; a token has about four letters. A higher limit allows longer answers; "
        "a short answer does not reach the limit. Usual: 512.",
        low=1,
        high=2048,
        step=1,
    )
    temperature: float = knob(
        0.0,
        "Randomness of every word; higher is more varied and less reliable. Usual: 0 or 0.1; at 0, the model always "
        "takes the likeliest word.",
        low=0.0,
        high=2.0,
        step=0.01,
    )

    @property
    def words(self) -> TokenSampling:
        """How a word is drawn."""
        return TokenSampling(temperature=self.temperature, top_p=TOP_P)


@dataclass(frozen=True)
class Words:
    """An answer so far."""

    text: str
    tokens: tuple[int, ...]  # with the end token, once it was drawn
    done: int  # tokens
    total: int  # the limit


@in_own_state
@torch.inference_mode()
def answer(
    model: JanusModel,
    head: WordHead,
    images: Sequence[Tensor],
    question: list[int],
    sampling: TokenSampling,
    limit: int,
    noise: TokenNoise,
) -> Generator[Words, None, Words]:
    """Answer a question.

    Args:
        model: the network with its metadata.
        head: its output layer for words.
        images: rows [S, C] of the tower and the aligner, one tensor an image, in their order in the question.
        question: token ids of :meth:`.JanusModel.question`.
        sampling: temperature, top-k and top-p of a word.
        limit: most tokens of the answer.
        noise: draws of one image.

    Yields the words so far after every token, and returns them.

    Raises:
        UserError: a head of another size, or logits that are not finite.
    """
    net = model.net
    device = net.compute_device
    if head.lm_head.out_features != net.config.words:
        raise UserError(
            f"model: the output layer of {model.name} has {head.lm_head.out_features} words, but the model's "
            f"vocabulary has {net.config.words}; download the files of the model again."
        )

    # 1. The question, with the images at their places.
    net.begin_run()
    ids = torch.tensor(question, device=device)[None]
    rows = net.words(ids).clone()
    rows[ids == model.template.place] = torch.cat(list(images)).to(rows)
    n = len(question)
    positions = Positions(net.rope(torch.arange(n + limit, device=device)), offset=n)
    hidden, cache = net.prefill(rows, model.grid, limit, positions=positions)

    # 2. Word after word.
    drawn: list[int] = []
    while True:
        logits = head(net.norm(hidden[:, -1:]))
        if not is_finite(logits):
            raise not_finite("model", model.name, "word logits")

        place = torch.tensor([len(drawn)], device=device)
        word = gumbel_max(logits, sampling, noise.stream("word", logits.shape[-1], device), place)
        drawn.append(int(word))

        said = Words(_text(model, drawn), tuple(drawn), len(drawn), limit)
        yield said
        if drawn[-1] == model.template.end or len(drawn) == limit:
            return said

        hidden = net.feed(net.words(word), place, place + n, cache, n + len(drawn))


def _text(model: JanusModel, tokens: Sequence[int]) -> str:
    """The text of an answer, without special tokens."""
    assert model.detokenize is not None, "the loader gives it"
    return model.detokenize(tokens).strip()


def answer_bytes(model: JanusModel, question: list[int], limit: int) -> float:
    """Bytes of the KV cache, the largest pass and the logits of an answer; an upper estimate."""
    c = model.net.config
    size = next(model.net.parameters()).element_size()
    rows = len(question) * (_ROWS * c.dim + 3 * c.hidden) * size
    return cache_bytes(model.net, len(question) + limit) + rows + 4.0 * _LOGITS * c.words


def expect_reader(model: Any) -> None:
    """Check that a model answers questions about images: a Janus with all its parts.

    Raises:
        UserError: another model, or a file without them.
    """
    family = families().get(model.family)
    if family is None or not family.answers:
        raise UserError(f"model: {model.name} cannot answer questions about images; use a Janus model.")
    if model.vision_file is None:
        raise UserError(
            f"model: the file of {model.name} lacks the part that reads images; get a file with all weights of the "
            "model."
        )
