"""Training of the demo's Tar language model, which predicts
semantic codes from a caption, and of its two de-tokenizers.

Source: Han et al. 2025, "Vision as a Dialect" (Tar, arXiv 2506.18898). The targets are codes of the shipped TA-Tok
(``ta_tok_recipe.py``) and VQ tokenizer (``token_recipes.py``). The language model is conditioned on prompts of
:meth:`TarModel.prompt`, with a loss on the codes alone; the
de-tokenizers on TA-Tok's features of the codes, as AR-DTok.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...model_loaders.tar.loader import SCALES
from ...networks.autoencoder import VQAutoencoder
from ...networks.llama import Llama, LlamaConfig, qwen_config
from ...networks.ta_tok import TATok
from ...networks.tar import SpecialTokens, TarModel
from . import captions
from .initialise import initialise_llama
from .recipes import NULL_LABELS, TRAIN_SEED, book, save_checkpoint
from .ta_tok_recipe import TA_TOK, semantic_codes
from .token_recipes import GRID, LARGE_PICTURES, LOW_GRID, SMALL_PICTURES, VQ, TokenRecipe, code_book, token_defaults
from .training import Figures, Job, Schedule, generator, seeded, train

# Scales of consecutive training steps, in the proportions of Tar's training.
SCALE_CYCLE = (0, 0, 1, 2)
# Held-out images at the end of the book: at most this many, and at most a fifth.
HELD = 500


@torch.no_grad()
def semantic_book(job: Job, ta_tok: TATok, count: int) -> list[Tensor]:
    """Semantic codes int16 [count, n] of the first training images at every scale, the finest first."""
    found: list[list[Tensor]] = [[] for _ in range(SCALES)]
    for _, rgb in book(job, count):
        for part in rgb.split(100):
            for parts, codes in zip(found, semantic_codes(ta_tok, part.to(job.device).float() / 255), strict=True):
                parts.append(codes.to("cpu", torch.int16))
    return [torch.cat(parts) for parts in found]


def corrupted(codes: Tensor, values: int, share: float, g: torch.Generator) -> Tensor:
    """Codes int64 [B, n], some of them replaced by random ones
    below ``values``; the rate of a row is uniform in [0, 2 share].
    """
    shares = 2 * share * torch.rand(len(codes), 1, generator=g)
    wrong = (torch.rand(codes.shape, generator=g) < shares).to(codes.device)
    return torch.where(wrong, torch.randint(values, codes.shape, generator=g).to(codes.device), codes)


def _held(count: int) -> int:
    return min(HELD, count // 5)


# ------------------------------------------------------------------------------------------------ language model

LANGUAGE_SCHEDULE = Schedule(steps=6500, batch=64, lr=1e-3, muon_lr=2e-3, ema=0.9985, decay=0.45)
LANGUAGE_COUNT, VARIANTS = SMALL_PICTURES, 4
# Rate of wrong codes in the input. A model trained on correct prefixes alone does not recover from its own errors.
CONTEXT_ERRORS = 0.02
# Longest sequence; longer ones are rejected.
_POSITIONS = 512


def language_config(codes: int = TA_TOK.codes) -> LlamaConfig:
    """Configuration of the demo's language model for a codebook."""
    words = captions.tokenizer(codes, SCALES)
    return qwen_config(
        dim=128, depth=3, heads=4, kv_heads=2, head_dim=32, hidden=320, vocab=words.size + len(words.special_tokens),
        positions=_POSITIONS, theta=1e4,
    )  # fmt: skip


def build_language(config: LlamaConfig | None = None, start: nn.Module | None = None) -> Llama:
    """A language model with random weights or those of ``start``; None selects :func:`language_config`."""
    return seeded(59, lambda: initialise_llama(Llama(config or language_config())), start)


def tar_model(net: Llama, codes: int = TA_TOK.codes, side: int = TA_TOK.side) -> TarModel:
    """A language model with the demo's vocabulary, as the loader returns it; ``codes`` and ``side`` are TA-Tok's."""
    words = captions.tokenizer(codes, SCALES)
    ids = words.special_tokens
    marks = SpecialTokens(ids["<im_start>"], ids["<S0>"], ids["<I0>"], codes, (ids["<|im_start|>"], ids["<|im_end|>"]))
    return TarModel(net, "picture book Tar", words.encode, marks, tuple(side // (i + 1) for i in range(SCALES)))


def language_loss(
    net: nn.Module,
    marks: SpecialTokens,
    prompts: Tensor,
    lengths: Tensor,
    codes: Tensor,
    scale: int,
    g: torch.Generator | None = None,
) -> tuple[Tensor, Figures]:
    """Cross-entropy in nats per code of codes int64 [B, n] given prompts int64 [B, L] and their lengths, of
    :func:`prompt_book`.

    ``g`` corrupts input codes, never targets; None disables this.
    """
    n = codes.shape[1]
    read = codes if g is None else corrupted(codes, marks.codes, CONTEXT_ERRORS, g)
    prompts = prompts.scatter_add(1, lengths[:, None] - 1, torch.full_like(lengths, scale)[:, None])

    # Codes follow their prompt; the padding comes last, where the causal mask hides it.
    at = lengths[:, None] + torch.arange(n, device=codes.device)
    ids = torch.cat([prompts, torch.zeros_like(codes)], dim=1).scatter(1, at, marks.code + read)[:, :-1]
    place, positions = torch.arange(-ids.shape[1], 0, device=ids.device), net.positions(0, ids.shape[1])
    logits = net(net.tok_embeddings(ids), place, positions, span=(marks.code, marks.code + marks.codes))
    logits = logits.gather(1, (at - 1)[..., None].expand(-1, -1, marks.codes))
    nats = F.cross_entropy(logits.flatten(0, 1), codes.flatten())
    right = (logits.detach().argmax(-1) == codes).float().mean()

    return nats, {f"nats{scale}": nats, f"right{scale}": right}


def language_batch(
    step: int, batch: int, codes: Sequence[Tensor], prompts: Tensor, lengths: Tensor, g: torch.Generator, count: int
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Random batch of :func:`language_loss` from the first ``count``
    of all images: prompts, lengths and codes int64, and the scale.
    """
    scale = SCALE_CYCLE[step % len(SCALE_CYCLE)]
    rows = torch.randint(count, (batch,), generator=g)
    variant = torch.randint(prompts.shape[1], (batch,), generator=g)
    return prompts[rows, variant].long(), lengths[rows, variant].long(), codes[scale][rows].long(), scale


def save_language(net: Llama, out: Path, codes: int = TA_TOK.codes, side: int = TA_TOK.side) -> None:
    """Write the language model with its configuration and tokenizer."""
    c, m = net.config, tar_model(net, codes, side).special
    sizes = {"hidden_size": c.dim, "num_hidden_layers": c.depth, "num_attention_heads": c.heads}
    sizes |= {"num_key_value_heads": c.kv_heads, "intermediate_size": c.hidden, "vocab_size": c.vocab}
    rest = {"rope_theta": c.theta, "rms_norm_eps": c.eps, "max_position_embeddings": c.positions}
    rest |= {"tie_word_embeddings": c.tied, "semantic_side": side}
    firsts = {"image_start_tag_id": m.image, "scale_start_token_id": m.scale, "image_start_token_id": m.code}
    lasts = {"image_end_tag_id": m.image + 1, "scale_end_token_id": m.scale + SCALES - 1}
    ids = {**firsts, **lasts, "image_end_token_id": m.code + m.codes - 1}
    config, words = {"model_type": "qwen2", **sizes, **rest, **ids}, captions.tokenizer_json(codes, SCALES)
    save_checkpoint(net, out, family="tar", config=config, tokenizer=words, name="picture book Tar")


def train_language(job: Job, out: Path, ta_tok: TATok, start: Llama | None = None) -> Llama:
    """Train the language model on the codes of ``ta_tok``, loaded from its fp16 file as shipped, and write ``out``."""
    c, count, device = ta_tok.config, job.count(LANGUAGE_COUNT), job.device
    held = _held(count)
    codes = semantic_book(job, ta_tok, count + held)
    net = build_language(language_config(c.codes), start).to(device)
    model = tar_model(net, c.codes, c.side)
    seeds = range(TRAIN_SEED * VARIANTS, (TRAIN_SEED + 1) * VARIANTS)
    prompts, lengths = captions.prompt_book(lambda text: model.prompt(text, 0), count + held, seeds)

    def loss(module: nn.Module, step: int) -> tuple[Tensor, Figures]:
        g = generator(61, step)
        ids, ends, what, scale = language_batch(step, LANGUAGE_SCHEDULE.batch, codes, prompts, lengths, g, count)
        return language_loss(module, model.special, ids.to(device), ends.to(device), what.to(device), scale, g)

    train(job, "tar", net, loss, LANGUAGE_SCHEDULE)
    save_language(net, out, c.codes, c.side)
    ids, ends = (t[count:, 0].long().to(device) for t in (prompts, lengths))

    for scale, part in enumerate(codes):
        with torch.no_grad():
            nats, _ = language_loss(net, model.special, ids, ends, part[count:].long().to(device), scale)
        job.log(f"tar: {part.shape[1]} codes: {float(nats):.3f} nats per code on {held} held-out images")

    return net


# ------------------------------------------------------------------------------------------------ de-tokenizers

# Rate of wrong semantic codes in training, for robustness to errors of the language model.
CODE_ERRORS = 0.03


def detokenizer_config(
    grid: int, width: int = TA_TOK.width, side: int = TA_TOK.side, vocab: int = VQ.codes
) -> LlamaConfig:
    """Configuration of a demo de-tokenizer of ``grid`` x ``grid`` tokens; width and side are TA-Tok's."""
    return replace(
        TokenRecipe.config, vocab=vocab, condition="features", condition_size=width, absolute=side**2 + grid**2 - 1
    )


_SMALL = Schedule(steps=8000, batch=64, lr=1e-3, muon_lr=2e-3, ema=0.9985, decay=0.45)
# An AR-DTok's configuration depends on TA-Tok, see :func:`detokenizer_config`.
DTOK_LOW = TokenRecipe("dtok-low", "picture book AR-DTok, 8x8", LOW_GRID, _SMALL, SMALL_PICTURES)
DTOK_HIGH = TokenRecipe(
    "dtok", "picture book AR-DTok, 16x16", GRID, replace(_SMALL, steps=20000, batch=24), LARGE_PICTURES
)
DETOKENIZERS = {recipe.name: recipe for recipe in (DTOK_LOW, DTOK_HIGH)}


def detokenizer_logits(net: Llama, features: Tensor, tokens: Tensor) -> Tensor:
    """Teacher-forced logits fp32 [B, N, V] of raster-order tokens
    [B, N] given features [B, n, C]; zeros mean "no condition".
    """
    n, count = features.shape[1], tokens.shape[1]
    place = torch.arange(-n, count - 1, device=tokens.device)
    rows = torch.cat([net.prefix(features), net.tok_embeddings(tokens[:, :-1])], dim=1)
    return net(rows, place, net.positions(round(count**0.5), n))[:, n - 1 :]


def detokenizer_loss(
    net: nn.Module, ta_tok: TATok, codes: Tensor, tokens: Tensor, g: torch.Generator | None = None
) -> tuple[Tensor, Figures]:
    """Cross-entropy in nats per token of tokens int64 [B, N] given semantic codes int64 [B, n]. ``g`` corrupts codes
    and drops the condition of some images; None disables both."""
    if g is not None:
        codes = corrupted(codes, ta_tok.config.codes, CODE_ERRORS, g)
    with torch.no_grad(), torch.autocast(codes.device.type, enabled=False):
        features = ta_tok.features(codes)
        if g is not None:
            null = (torch.rand(len(codes), 1, 1, generator=g) < NULL_LABELS).to(codes.device)
            features = features.masked_fill(null, 0)

    logits = detokenizer_logits(net, features, tokens)
    nats = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    right = (logits.detach().argmax(-1) == tokens).float().mean()

    return nats, {"nats": nats, "right": right}


def detokenizer_batch(
    step: int, batch: int, codes: Sequence[Tensor], tokens: Tensor, g: torch.Generator, count: int
) -> tuple[Tensor, Tensor]:
    """Random batch of :func:`detokenizer_loss`: codes and tokens int64; arguments as for :func:`language_batch`."""
    rows = torch.randint(count, (batch,), generator=g)
    return codes[SCALE_CYCLE[step % len(SCALE_CYCLE)]][rows].long(), tokens[rows].long()


def save_detokenizer(net: Llama, recipe: TokenRecipe, out: Path) -> None:
    """Write a de-tokenizer. The codes determine the content, so the large one needs no lower temperature."""
    about = {"heads": net.config.heads, "grid": recipe.grid, "label_set": "picture-book", "decoder": "demo-vq"}
    about |= {"ta_tok": "demo-ta-tok", "name": recipe.title, "defaults": token_defaults(recipe.grid)}
    save_checkpoint(net, out, family="dtok", **about)


def train_detokenizer(
    job: Job, out: Path, recipe: TokenRecipe, ta_tok: TATok, vq: VQAutoencoder, start: Llama | None = None
) -> Llama:
    """Train a de-tokenizer and write ``out``; ``ta_tok`` and ``vq`` are loaded from their fp16 files as shipped."""
    c, count, device = ta_tok.config, job.count(recipe.count), job.device
    held = _held(count)
    semantic, tokens = semantic_book(job, ta_tok, count + held), code_book(job, vq, count + held, recipe.grid).codes
    config = detokenizer_config(recipe.grid, c.width, c.side, vq.config.codes)
    net = seeded(67, lambda: initialise_llama(Llama(config)), start).to(device)

    def loss(module: nn.Module, step: int) -> tuple[Tensor, Figures]:
        g = generator(71, step)
        codes, what = detokenizer_batch(step, recipe.schedule.batch, semantic, tokens, g, count)
        return detokenizer_loss(module, ta_tok, codes.to(device), what.to(device), g)

    train(job, recipe.name, net, loss, recipe.schedule)
    save_detokenizer(net, recipe, out)

    for codes in semantic:
        nats = 0.0
        for a, b in zip(codes[count:].split(50), tokens[count:].split(50), strict=True):
            with torch.no_grad():
                nats += float(detokenizer_loss(net, ta_tok, a.long().to(device), b.long().to(device))[0]) * len(a)
        job.log(f"{recipe.name}: {codes.shape[1]} codes: {nats / held:.3f} nats per token on {held} held-out images")

    return net
