"""Training of the demo's hybrid, a MAR of prompts in Harmon's layout.

Source: Wu et al. 2025 (Harmon, arXiv 2503.21979): a language model between a MAR's encoder and decoder provides the
prompt. The MAR is the class-conditional demo MAR and is not trained; the language model starts from the demo's Tar. The
last layer of ``proj_out`` starts at zero, so the first step equals the MAR without a class label.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...model_loaders.files.tokenizer import Tokenizer, load_tokenizer
from ...networks.autoencoder import KLAutoencoder
from ...networks.hybrid import UNCONDITIONAL, Hybrid, HybridConfig, HybridModel
from ...networks.llama import EMBEDDING, attend
from ...networks.mar import MAR, pick
from ...networks.tar import TarModel
from ...samplers.mar.tables import Constants, constants
from . import captions, recipes
from .initialise import initialise_hybrid
from .recipes import NULL_LABELS, T_MAX, TARGET, book, divided, head_loss, inexact, latents, save_checkpoint
from .tar_recipes import language_config
from .training import Figures, Job, Schedule, generator, seeded, train

NAME, TITLE = "hybrid", "picture book hybrid"
# Sampling defaults, stored in the checkpoint. At cfg 2 one red boat of ten was green.
DEFAULTS = {**recipes.DEFAULTS, "cfg": 3.0}
SCHEDULE = Schedule(steps=1000, batch=32, lr=8e-4, muon_lr=1.6e-3, warmup=20, ema=0.99, decay=0.7)
# The first stage trains the language model and the MLPs alone,
# see :func:`whole_loss`; at most this many tokens are known.
START_SCHEDULE = Schedule(steps=500, batch=64, lr=1e-3, muon_lr=2e-3, warmup=20, ema=0.98, decay=0.6)
FEW = 8
COUNT, VARIANTS = 27000, 4
# Seed of the captions, apart from those of Tar's training.
CAPTION_SEED = 8000
# The prompt decides at high timesteps and while few tokens are known: the lowest timestep of the loss, the largest
# weight of its noise MSE, masked tokens per image in the loss, and the power of the share of known tokens.
LOWEST, MOST, MASKED, POWER = 500, 10.0, 32, 3.0


def tokenizer() -> Tokenizer:
    """The word-level tokenizer of the demo's hybrid."""
    return load_tokenizer(Path(), "", {"tokenizer": json.dumps(captions.prompt_tokenizer_json())})


def config() -> HybridConfig:
    """Configuration of the demo's hybrid: the demo MAR and the demo Tar's language model."""
    words = tokenizer()
    language = replace(language_config(), vocab=words.size + len(words.special_tokens))
    return HybridConfig(replace(TARGET, classes=0), language)


def build(shape: HybridConfig | None = None, start: Hybrid | None = None) -> Hybrid:
    """A hybrid with random weights, whose prompts have no effect
    yet, or a copy of ``start``; None selects :func:`config`.
    """

    def make() -> Hybrid:
        net = initialise_hybrid(Hybrid(shape or config()))
        nn.init.zeros_(net.proj_out[2].weight)
        return net

    return seeded(79, make, start)


def hybrid_model(net: Hybrid) -> HybridModel:
    """A hybrid with the demo's vocabulary, as the loader returns it."""
    words, side = tokenizer(), net.config.mar.grid
    opening, closing = (words.special_tokens[name] for name in captions.TURNS)
    about = {"latent_scale": 1.0, "t_max": T_MAX, "label_set": "picture-book", "trained": side}
    return HybridModel(net.mar, TITLE, hybrid=net, tokenize=words.encode, turn=(opening, closing), **about)


@torch.no_grad()
def joined(mar: MAR, tar: TarModel, shape: HybridConfig | None = None) -> Hybrid:
    """:func:`build` with the weights of a MAR and of Tar's language
    model of the same shapes; embeddings are copied by word.
    """
    net, words, state = build(shape), tokenizer(), tar.net.state_dict()
    net.mar.load_state_dict({k: v for k, v in mar.state_dict().items() if k != "class_emb.weight"})
    table, old = net.llm.tok_embeddings.weight, state.pop(EMBEDDING)
    count = len(captions.vocabulary())  # the first ids of both tokenizers
    table[:count] = old[:count]
    assert tar.special.chat is not None
    for name, i in zip(captions.TURNS, tar.special.chat, strict=True):
        table[words.special_tokens[name]] = old[i]
    net.llm.load_state_dict({**state, EMBEDDING: table})

    return net


def latent_book(job: Job, kl: KLAutoencoder, count: int) -> Tensor:
    """Tokens fp16 [count, L, channels] of the first training images."""
    out = []
    for _, rgb in book(job, count):
        with torch.autocast(job.device.type, torch.bfloat16, enabled=job.device.type != "mps"):
            out.append(latents(kl, rgb, job.device)[0].flatten(2).transpose(1, 2).half())
    return torch.cat(out)


def batch_of(
    book: Tensor, prompts: Tensor, lengths: Tensor, blank: Tensor, batch: int, g: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """A random batch: tokens fp32 [B, L, channels], ids int64 [B, P] and lengths int64 [B]; some prompts are the
    unconditional one, ``blank``, for guidance.
    """
    rows = torch.randint(len(book), (batch,), generator=g)
    variant = torch.randint(prompts.shape[1], (batch,), generator=g)
    ids, ends = prompts[rows, variant].long(), lengths[rows, variant].long()
    null = torch.rand(batch, generator=g) < NULL_LABELS
    ids[null, : len(blank)], ends[null] = blank, len(blank)

    return book[rows].float(), ids[:, : int(ends.max())], ends


def fuse(net: Hybrid, encoded: Tensor, known: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    """:meth:`.Hybrid.fuse`, differentiable: the prompts are included in the sequence.

    Args:
        encoded: the encoder's output [B, buffer + K, C].
        known: int64 [B, K], known positions, ascending.
        ids, lengths: prompts int64 [B, P], padded at the end, and their tokens, int64 [B].
    """
    most, order = ids.shape[1], net.llm_order(known)
    y = pick(net.proj_in(encoded), order)

    # Prompt, image, then the prompt's padding.
    slot = torch.arange(most + y.shape[1], device=ids.device).expand(len(ids), -1).clone()
    padding = torch.arange(most, device=ids.device) >= lengths[:, None]
    slot[:, :most] += padding * y.shape[1]
    slot[:, most:] -= (most - lengths)[:, None]
    x = pick(torch.cat([net.llm.tok_embeddings(ids), y], 1), slot.argsort(1))
    position = torch.arange(x.shape[1], device=ids.device)[None]
    h = net.llm.hidden(x, position, lambda layer, q, k, v: attend(q, k, v, causal=True))
    h = pick(h, slot[:, most:])

    return encoded + net.proj_out(pick(h, order.argsort(1)))


def conditions(
    net: Hybrid, tokens: Tensor, known: Tensor, ids: Tensor, lengths: Tensor, wanted: Tensor | None = None
) -> Tensor:
    """z of ``MAR.decode`` at ``wanted`` int64 [B, M] (None:
    everywhere), of tokens fp32 [B, L, channels], as for :func:`fuse`.
    """
    encoded = net.mar.encode(tokens, known, net.mar.class_rows(None, len(tokens)))
    return net.mar.decode(fuse(net, encoded, known, ids, lengths), known, wanted)


def hybrid_loss(
    net: Hybrid, tokens: Tensor, ids: Tensor, lengths: Tensor, full: Constants, g: torch.Generator
) -> tuple[Tensor, Figures]:
    """MAR's loss of masked tokens of a batch of :func:`batch_of`; ``full``: the 1000-step tables."""
    hidden, known = (places.to(tokens.device) for places in divided(tokens.shape[1], len(tokens), g, POWER))
    hidden = hidden[:, :MASKED]
    z = conditions(net, inexact(tokens, g), known, ids, lengths, hidden)
    mse, bound = head_loss(net.head, z, tokens, hidden, full, g, 1, MOST, LOWEST)
    return mse + bound, {"mse": mse, "bound": bound}


def whole_loss(net: Hybrid, tokens: Tensor, ids: Tensor, lengths: Tensor, g: torch.Generator) -> tuple[Tensor, Figures]:
    """Error of the decoder's input rows, given a few tokens and the
    prompt, as an estimate of the encoder's output for the whole image.

    The MAR's decoder draws an image from the buffer rows of
    that output alone, so they are what a prompt has to provide.
    """
    batch, count = tokens.shape[:2]
    few = int(torch.randint(FEW + 1, (), generator=g))
    known = torch.rand(batch, count, generator=g).argsort(1)[:, :few].sort(1).values.to(tokens.device)
    buffer, every = net.config.mar.buffer, torch.arange(count, device=tokens.device).expand(batch, -1)

    with torch.no_grad():
        null = net.mar.class_rows(None, batch)
        whole = net.mar.encode(tokens, every, null)
        target = torch.cat([whole[:, :buffer], pick(whole, known + buffer)], 1)
        encoded = net.mar.encode(inexact(tokens, g), known, null)

    rows = fuse(net, encoded, known, ids, lengths)
    error = F.mse_loss(rows.float(), target.float())

    return error, {"buffer rows": F.mse_loss(rows[:, :buffer].float(), target[:, :buffer].float())}


def save_hybrid(net: Hybrid, out: Path) -> None:
    """Write the hybrid with its configuration and tokenizer."""
    c, mar = net.config.llm, net.config.mar
    llm: dict[str, float] = {"num_attention_heads": c.heads, "max_position_embeddings": c.positions}
    llm |= {"rope_theta": c.theta, "rms_norm_eps": c.eps}
    about = {"config": {"llm": llm, "mar": {"encoder_num_heads": mar.heads}}, "grid": mar.grid, "latent_scale": 1.0}
    about |= {"tokenizer": captions.prompt_tokenizer_json(), "t_max": T_MAX, "label_set": "picture-book"}
    save_checkpoint(net, out, family="hybrid", **about, decoder="demo-kl", name=TITLE, defaults=DEFAULTS)


def train_hybrid(job: Job, out: Path, kl: KLAutoencoder, start: Hybrid, first: bool = True) -> Hybrid:
    """Train the hybrid on the latents of the autoencoder, loaded from its fp16 file as shipped, and write ``out``;
    ``first``: whether to begin with the first stage."""
    count, full = job.count(COUNT), constants()
    tokens, net = latent_book(job, kl, count), build(start.config, start)
    model = hybrid_model(net)
    prompts, lengths = captions.prompt_book(model.prompt, count, range(CAPTION_SEED, CAPTION_SEED + VARIANTS))
    blank = torch.tensor(model.instruction(UNCONDITIONAL))

    def batch(size: int, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        known, ids, ends = batch_of(tokens, prompts, lengths, blank, size, g)
        return known.to(job.device), ids.to(job.device), ends.to(job.device)

    def first_loss(module: nn.Module, step: int) -> tuple[Tensor, Figures]:
        g = generator(71, step)
        return whole_loss(cast(Hybrid, module), *batch(START_SCHEDULE.batch, g), g)

    def loss(module: nn.Module, step: int) -> tuple[Tensor, Figures]:
        g = generator(73, step)
        return hybrid_loss(cast(Hybrid, module), *batch(SCHEDULE.batch, g), full, g)

    net.mar.requires_grad_(False)
    if first:
        train(job, f"{NAME}-start", net, first_loss, START_SCHEDULE)
    train(job, NAME, net, loss, SCHEDULE)
    save_hybrid(net, out)

    return net
