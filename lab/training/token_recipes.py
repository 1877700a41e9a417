"""Configurations and trainings of the demo's VQ tokenizer, LlamaGens and PAR.

One tokenizer of stride 8 encodes images of 64 and of 128 pixels, so that a GPT on an 8 x 8 grid can draft for one on 16
x 16. The PAR is trained in PAR's order and under PAR's attention mask. As in ``recipes.py``, every recipe writes one
fp16 safetensors file whose metadata holds the configuration that the state dict does not contain.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...networks.autoencoder import KLAutoencoder, VQAutoencoder, VQConfig
from ...networks.llama import Llama, LlamaConfig, Positions
from ...samplers.tokens.par import par_groups
from . import picture_book
from .initialise import initialise_llama
from .recipes import NULL_LABELS, book, pictures, psnr, reconstruction_loss, save_checkpoint, to_signed
from .training import Figures, Job, Schedule, generator, seeded, train

# The convolutions equal those of the demo's KL autoencoder, whose weights initialise them.
VQ = VQConfig(ch=32, ch_mult=(1, 1, 2, 2), blocks=1, z_channels=8, codes=512, code_channels=8, groups=8)
VQ_SCHEDULE = Schedule(steps=2200, batch=32, lr=1.5e-3, ema=0.997, weight_decay=0.0, decay=0.6)
# Side of the images of alternating steps, and number of images.
VQ_PICTURES = {64: 16000, 128: 5000}
COMMITMENT = 0.25
# A code that was unused for PATIENCE steps is set to a random feature, in the first REVIVAL of the training.
PATIENCE, REVIVAL = 50, 0.6

LOW_GRID, GRID = 8, 16
# A model of this size overfits 30,000 small images, and 40,000 large ones within 10,000 steps. With 100,000 large ones
# the gap to held-out images is 0.05 nats per token after 20,000 steps.
SMALL_PICTURES, LARGE_PICTURES = 120_000, 100_000
# Sampling defaults of these models, stored in the checkpoint. The tail of the distribution contains most errors of a
# model of this size.
DEFAULTS = {"cfg": 1.5, "temperature": 1.0, "top_k": 0, "top_p": 0.8}
# ZipAR's window by grid. A window of 8 on the 8 x 8 grid would be raster order.
WINDOWS = {LOW_GRID: 6, GRID: 8}
# At 16 x 16 tokens, a lower temperature with a larger top_p gives more distinct scenes (LlamaGen) or more whole objects
# (Tar's de-tokenizer) than temperature 1 with a small top_p. The LlamaGen was trained on codes that it chose itself, so
# it needs less guidance.
LARGE_DEFAULTS = {"temperature": 0.6, "top_p": 0.9}
LARGE_LLAMAGEN_DEFAULTS = {"cfg": 1.1, "temperature": 0.75, "top_p": 0.95}


def token_defaults(grid: int) -> dict[str, float]:
    """Sampling defaults of a token model on a ``grid`` x ``grid`` token grid."""
    if grid not in WINDOWS:
        return DEFAULTS
    large = LARGE_DEFAULTS if grid == GRID else {}
    return {**DEFAULTS, **large, "window": WINDOWS[grid]}


def defaults(grid: int) -> dict[str, float]:
    """Sampling defaults of a LlamaGen or PAR on a ``grid`` x ``grid`` token grid."""
    return {**token_defaults(grid), **(LARGE_LLAMAGEN_DEFAULTS if grid == GRID else {})}


@dataclass(frozen=True)
class TokenRecipe:
    """A GPT on the picture book's codes; ``config.special`` makes it a PAR. ``count``: of training images.
    ``likely``: whether a second stage follows, on :func:`likely_codes`."""

    name: str
    title: str
    grid: int
    schedule: Schedule
    count: int
    config: LlamaConfig = LlamaConfig(
        dim=128, depth=6, heads=4, kv_heads=4, hidden=176, vocab=VQ.codes, condition="class",
        condition_size=len(picture_book.LABELS),
    )  # fmt: skip
    likely: bool = False


_SMALL = Schedule(steps=12000, batch=64, lr=1e-3, muon_lr=2e-3, ema=0.9985, decay=0.45)
GPT_LOW = TokenRecipe("llamagen-low", "picture book GPT, 8x8", LOW_GRID, _SMALL, SMALL_PICTURES)
GPT_HIGH = TokenRecipe(
    "llamagen", "picture book GPT, 16x16", GRID, replace(_SMALL, steps=30000, batch=24), LARGE_PICTURES,
    replace(TokenRecipe.config, depth=8, hidden=256), likely=True,
)  # fmt: skip
PAR = TokenRecipe(
    "par", "picture book PAR, 4 regions, 8x8", LOW_GRID, _SMALL, SMALL_PICTURES, replace(TokenRecipe.config, special=3)
)
RECIPES = {recipe.name: recipe for recipe in (GPT_LOW, GPT_HIGH, PAR)}

# The second stage: schedule, number of its images, std of the code vectors around the features in and around an
# object and elsewhere, and the weight of a token of the object: most tokens are background, most errors in objects.
LIKELY, LIKELY_PICTURES = Schedule(steps=5600, batch=24, lr=6e-4, muon_lr=1.2e-3, ema=0.998, decay=0.65), 30_000
SPREAD, OBJECT = (0.25, 0.4), 4.0
# Rounds of choosing codes before its first step, and the share of tokens that keep their code in a round or a step.
ROUNDS, KEPT = 3, 0.4
# The std where nobody knows what is an object.
EVERYWHERE = 0.3
# A sampled token is sometimes wrong, and the model has to go on from it. In half of the sequences up to MISLED of the
# tokens that the model reads are wrong: half of them are codes at about the distance NEAR, half are any.
MISLED, NEAR = 0.08, 0.35


# ------------------------------------------------------------------------------------------------ tokenizer


class _Tokenizer(nn.Module):
    """The network in training, and the number of steps since each code was used."""

    def __init__(self, net: VQAutoencoder):
        super().__init__()
        self.net = net
        # All codes start as unused, so the first batch initialises the codebook.
        self.register_buffer("idle", torch.full((net.config.codes,), float(PATIENCE)))

    @torch.no_grad()
    def revive(self, features: Tensor, g: torch.Generator) -> int:
        """Set unused codes to random unit features of [N, channels] and return their number."""
        unused = (self.idle >= PATIENCE).nonzero()[:, 0]
        rows = torch.randint(len(features), (len(unused),), generator=g).to(features.device)
        self.net.quantize.embedding.weight[unused] = features[rows]
        self.idle[unused] = 0
        return len(unused)

    @torch.no_grad()
    def count_idle(self, codes: Tensor) -> None:
        """Count one step without use for every code that is not among ``codes``."""
        self.idle.add_(1)
        self.idle[codes.flatten()] = 0


def quantisation_loss(net: VQAutoencoder, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The codes' vectors [B, channels, h, w] of unit vectors, with the features' gradient (straight-through, van den
    Oord et al. 2017); codes int64 [B, h, w]; codebook loss + commitment loss / 4."""
    codes = net.codes(features.detach())
    chosen = net.vectors(codes)
    loss = F.mse_loss(chosen, features.detach()) + COMMITMENT * F.mse_loss(features, chosen.detach())
    return features + (chosen - features).detach(), codes, loss


@torch.no_grad()
def initialise_from_kl(net: VQAutoencoder, kl: KLAutoencoder) -> None:
    """Initialise a tokenizer with the convolutions of an autoencoder of the same widths and as many latent channels.

    The encoder then computes its latents, whose direction is quantised.
    Attention blocks that it lacks start with an output of zero.
    """
    state, source, deepest = net.state_dict(), kl.state_dict(), len(net.config.ch_mult) - 1
    channels = net.config.code_channels
    if source["quant_conv.weight"].shape[0] != 2 * channels or net.config.z_channels != channels:
        found = source["quant_conv.weight"].shape[0] // 2
        raise ValueError(f"an autoencoder of {found} channels does not fit codes of {channels}")

    middle = {"block_1": "0", "attn_1": "1", "block_2": "2"}

    for name, value in source.items():
        side, part, *rest = name.split(".")
        if part in ("down", "up"):
            level = rest[0] if part == "down" else str(deepest - int(rest[0]))
            name = ".".join([side, "conv_blocks", level, *(["res", *rest[2:]] if rest[1] == "block" else rest[1:])])
        elif part == "mid":
            name = ".".join([side, part, middle[rest[0]], *rest[1:]])
        elif side in ("quant_conv", "post_quant_conv") or (side, part) == ("encoder", "conv_out"):
            continue
        if state[name].shape != value.shape:
            raise ValueError(f"{name}: {tuple(value.shape)} does not fit {tuple(state[name].shape)}")
        state[name].copy_(value)

    # The two linear layers before the latents, merged; the mean's half.
    mean, last = source["quant_conv.weight"][:channels, :, 0, 0], "encoder.conv_out"
    state[f"{last}.weight"].copy_(torch.einsum("oi,ichw->ochw", mean, source[f"{last}.weight"]))
    state[f"{last}.bias"].copy_(mean @ source[f"{last}.bias"] + source["quant_conv.bias"][:channels])
    state["quant_conv.weight"].copy_(torch.eye(channels)[:, :, None, None])
    state["quant_conv.bias"].zero_()

    # Code vectors have length 1; latents of unit variance have length sqrt(channels).
    state["post_quant_conv.weight"].copy_(channels**0.5 * source["post_quant_conv.weight"])
    state["post_quant_conv.bias"].copy_(source["post_quant_conv.bias"])

    for name, value in state.items():
        if ".attn." in name and "proj_out" in name:
            value.zero_()


def train_vq(job: Job, out: Path, kl: KLAutoencoder | None = None) -> VQAutoencoder:
    """Train the tokenizer on small and large images in alternating steps and write ``out``; ``kl`` initialises it."""
    data = {side: pictures(job, job.count(number), side)[0] for side, number in VQ_PICTURES.items()}
    sides, schedule = list(data), job.schedule(VQ_SCHEDULE)
    module = seeded(23, lambda: _Tokenizer(VQAutoencoder(VQ)))
    if kl is not None:
        initialise_from_kl(module.net, kl)

    def loss(module: nn.Module, step: int) -> tuple[Tensor, Figures]:
        g, side = generator(29, step), sides[step % len(sides)]
        # The same number of pixels per step at both sizes.
        batch = max(1, schedule.batch * sides[0] ** 2 // side**2)
        x = to_signed(data[side][torch.randint(len(data[side]), (batch,), generator=g)]).to(job.device)
        raw = module.net.features(x)

        # bf16 cannot distinguish neighbouring codes.
        with torch.autocast(job.device.type, enabled=False):
            features = F.normalize(raw.float(), dim=1)
            if step < REVIVAL * schedule.steps:
                module.revive(features.detach().permute(0, 2, 3, 1).flatten(0, 2), g)
            vectors, codes, codebook_loss = quantisation_loss(module.net, features)

        module.count_idle(codes)
        y = module.net.decoder(module.net.post_quant_conv(vectors)).float()
        figures = {f"psnr{side}": psnr(y, x), "gap": codebook_loss, "idle": (module.idle > PATIENCE / 2).sum()}

        return reconstruction_loss(y, x) + codebook_loss, figures

    train(job, "vq", module, loss, schedule)
    save_checkpoint(module.net, out, family="vq", groups=VQ.groups, name="picture book VQ, stride 8")

    for side in sides:
        found = tokenizer_figures(module.net, data[side][:500], job.device)
        job.log(f"vq: {side} pixels: {found[0]:.2f} dB, {found[1]} of {VQ.codes} codes used, perplexity {found[2]:.0f}")

    return module.net


@torch.no_grad()
def tokenizer_figures(net: VQAutoencoder, data: Tensor, device: torch.device) -> tuple[float, int, float]:
    """PSNR in dB, number of used codes, and code perplexity on images uint8 [N, 3, H, W]."""
    error, counts = 0.0, torch.zeros(net.config.codes)
    for part in data.split(50):
        x = to_signed(part).to(device)
        _, codes = net.encode(x)
        error += float(F.mse_loss(net.decode_codes(codes).float().clamp(-1, 1), x)) * len(part)
        counts += torch.bincount(codes.flatten().cpu(), minlength=len(counts))

    decibels = 10 * math.log10(4 * len(data) / max(error, 1e-9))
    return decibels, int((counts > 0).sum()), perplexity(counts)


def perplexity(counts: Tensor) -> float:
    """Perplexity of the distribution of codes with these counts."""
    share = counts[counts > 0] / counts.sum()
    return float(torch.exp(-(share * share.log()).sum()))


# ------------------------------------------------------------------------------------------------ GPT and PAR


@dataclass(frozen=True, eq=False)
class Layout:
    """Layout of an image's N tokens in a training sequence: cells in decoding order, position of each row (-1: the
    condition and transition tokens), and the attention mask, None for a causal one."""

    order: Tensor
    place: Tensor
    mask: Tensor | None

    @staticmethod
    def of(grid: int, regions: int = 1) -> Layout:
        """Raster order, or PAR's (arXiv 2412.15119): the condition, the first token of every
        region, ``regions - 1`` transition tokens, and all groups but the last. Row i predicts
        token i of the order: initial tokens one at a time, every later group the next group.
        """
        n, count, nowhere = regions, grid * grid, torch.tensor([-1])
        if n == 1:
            order = torch.arange(count)
            return Layout(order, torch.cat([nowhere, order[:-1]]), None)

        order = torch.tensor(par_groups(grid, n)).flatten()
        place = torch.cat([nowhere, order[:n], nowhere.expand(n - 1), order[n:-n]])
        row = torch.arange(count)

        # From the last initial token on, rows attend to their whole group.
        group = torch.where(row < n, -row - 1, (row - n) // n)

        return Layout(order, place, (row[:, None] >= row) | (group[:, None] == group))

    def to(self, device: torch.device) -> Layout:
        """The layout on ``device``."""
        return Layout(self.order.to(device), self.place.to(device), None if self.mask is None else self.mask.to(device))


def sequence_logits(net: Llama, layout: Layout, places: Positions, labels: Tensor, tokens: Tensor) -> Tensor:
    """Teacher-forced logits fp32 [B, N, V] of tokens int64 [B, N] in the layout's order; entry i predicts token i.

    ``labels`` int64 [B]: the number of classes means "no label".
    """
    rows, n = net.tok_embeddings(tokens), net.config.regions
    parts = [rows[:, :-1]]
    if n > 1:
        parts = [
            rows[:, :n],
            net.spe_tok_embeddings.special_embeddings.weight.expand(len(tokens), -1, -1),
            rows[:, n:-n],
        ]

    return net(torch.cat([net.prefix(labels), *parts], dim=1), layout.place, places, layout.mask)


class CodeBook(NamedTuple):
    """Training images as the GPTs read them, N tokens each in raster order."""

    codes: Tensor  # int16 [count, N]
    labels: Tensor  # int64 [count]
    features: Tensor  # unit vectors fp16 [count, N, channels], to which the codes are nearest
    objects: Tensor  # bool [count, N]: tokens of the object, and their neighbours


@torch.no_grad()
def code_book(job: Job, vq: VQAutoencoder, count: int, grid: int) -> CodeBook:
    """The first ``count`` training images of ``grid`` x ``grid`` tokens."""
    codes, labels, features, objects = [], [], [], []
    for s, rgb in book(job, count, grid * vq.config.stride):
        for part in rgb.split(50):
            found = F.normalize(vq.features(to_signed(part).to(job.device)).float(), dim=1)
            codes.append(vq.codes(found).flatten(1).to("cpu", torch.int16))
            features.append(found.flatten(2).transpose(1, 2).to("cpu", torch.float16))
        labels.append(torch.from_numpy(s.label))
        cover = torch.from_numpy(picture_book.render(s, 4 * grid)[1])[:, None].float() / 255
        objects.append((F.max_pool2d(F.avg_pool2d(cover, 4), 3, 1, 1) > 0.02).flatten(1))

    return CodeBook(*(torch.cat(parts) for parts in (codes, labels, features, objects)))


def likely_codes(logits: Tensor, features: Tensor, vectors: Tensor, spread: Tensor) -> Tensor:
    """Entropy-constrained quantisation (Chou, Lookabaugh and Gray 1989, "Entropy-constrained
    vector quantization"): codes int64 [B, N] that minimise |feature - vector|² / (2 spread²)
    - log p, where p is the model's probability of the code after those before it.

    The encoder's nearest codes depend on the whole image in ways that a small model cannot predict. These decode to
    nearly the same image and need fewer nats.

    Args:
        logits: of every code given those before it, [B, N, V]. features:
            unit vectors [B, N, C]. vectors: of the codes, [V, C].
        spread: standard deviation of the vectors around the features, fp32 [B, N].
    """
    distance = 2 - 2 * features.float() @ vectors.T
    return (distance / (2 * spread[..., None] ** 2) - logits.float().log_softmax(-1)).argmin(-1)


def misled(tokens: Tensor, vectors: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens int64 [B, N] of which some are wrong, see :data:`MISLED`, and whether a sequence is right, bool [B].

    ``vectors``: of the codes, [V, C].
    """
    count = len(vectors)
    shares = MISLED * torch.rand(len(tokens), 1, generator=g) * (torch.rand(len(tokens), 1, generator=g) < 0.5)
    wrong = torch.rand(tokens.shape, generator=g) < shares

    distance = 2 - 2 * vectors @ vectors.T
    near = (-distance / (2 * NEAR**2)).fill_diagonal_(-math.inf).softmax(-1)
    out, old = tokens.clone(), tokens[wrong]
    if len(old):
        close = torch.multinomial(near[old], 1, generator=g)[:, 0]
        any_code = torch.randint(count, old.shape, generator=g)
        out[wrong] = torch.where(torch.rand(old.shape, generator=g) < 0.5, close, any_code)

    return out, shares[:, 0] == 0


class _Choosing(nn.Module):
    """A GPT in training, and the codes int16 [count, N] that it chose for its images."""

    def __init__(self, net: Llama, codes: Tensor):
        super().__init__()
        self.net = net
        self.register_buffer("codes", codes)


def train_gpt(job: Job, out: Path, recipe: TokenRecipe, vq: VQAutoencoder, start: Llama | None = None) -> Llama:
    """Train a GPT or PAR on the codes of the tokenizer, loaded from its fp16 file as shipped, and write ``out``. A
    model with a second stage that begins with ``start`` is trained in that stage only.
    """
    net = seeded(31, lambda: initialise_llama(Llama(recipe.config)), start).to(job.device)

    if start is None or not recipe.likely:
        data = _in_order(code_book(job, vq, job.count(recipe.count), recipe.grid), recipe)
        _train_on_nearest(job, recipe, net, data)
    if recipe.likely:
        data = _in_order(code_book(job, vq, job.count(LIKELY_PICTURES), recipe.grid), recipe)
        _train_on_likely(job, recipe, net, data, vq.quantize.unit().detach())

    save_gpt(recipe, net, out)
    return net


def _in_order(data: CodeBook, recipe: TokenRecipe) -> CodeBook:
    """Training images with their tokens in the decoding order of a recipe."""
    order = Layout.of(recipe.grid, recipe.config.regions).order
    return CodeBook(data.codes[:, order], data.labels, data.features[:, order], data.objects[:, order])


class _Reading:
    """A GPT's logits of a recipe's sequences."""

    def __init__(self, recipe: TokenRecipe, net: Llama, device: torch.device):
        self.layout = Layout.of(recipe.grid, recipe.config.regions).to(device)
        self.places = net.positions(recipe.grid, 1)
        self.device = device

    def __call__(self, net: Llama, labels: Tensor, tokens: Tensor) -> Tensor:
        """As :func:`sequence_logits`."""
        return sequence_logits(net, self.layout, self.places, labels.to(self.device), tokens.to(self.device))


def _nats(logits: Tensor, tokens: Tensor) -> Tensor:
    """Nats of every token, fp32 [B, N]."""
    tokens = tokens.to(logits.device)
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none").view_as(tokens)


def _batch(data: CodeBook, recipe: TokenRecipe, size: int, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Rows int64 [B] of a step, whether each has no label, bool [B], and its label, int64 [B]."""
    rows = torch.randint(len(data.codes), (size,), generator=g)
    null = torch.rand(len(rows), generator=g) < NULL_LABELS
    return rows, null, data.labels[rows].masked_fill(null, recipe.config.condition_size)


def _train_on_nearest(job: Job, recipe: TokenRecipe, net: Llama, data: CodeBook) -> None:
    """The first stage, on the encoder's codes."""
    read = _Reading(recipe, net, job.device)

    def loss(module: nn.Module, step: int) -> tuple[Tensor, Figures]:
        rows, _, labels = _batch(data, recipe, recipe.schedule.batch, generator(37, step))
        tokens = data.codes[rows].long()
        logits = read(module, labels, tokens)
        nats = _nats(logits, tokens).mean()
        return nats, {"nats": nats, "right": (logits.detach().argmax(-1).cpu() == tokens).float().mean()}

    train(job, recipe.name, net, loss, recipe.schedule)


def _train_on_likely(job: Job, recipe: TokenRecipe, net: Llama, data: CodeBook, vectors: Tensor) -> None:
    """The second stage, on codes that the model finds likely, which it chooses anew as it learns."""
    read = _Reading(recipe, net, job.device)
    spread = torch.where(data.objects, *SPREAD)

    def chosen(logits: Tensor, rows: Tensor) -> Tensor:
        features, about = data.features[rows].to(job.device), spread[rows].to(job.device)
        return likely_codes(logits.detach(), features, vectors, about).cpu()

    def loss(module: nn.Module, step: int) -> tuple[Tensor, Figures]:
        g = generator(37, step)
        rows, null, labels = _batch(data, recipe, LIKELY.batch, g)
        tokens = module.codes[rows].long().cpu()
        told, right = misled(tokens, vectors.cpu(), g)
        logits = read(module.net, labels, told)
        nats = _nats(logits, tokens)
        weight = torch.where(data.objects[rows], OBJECT, 1.0).to(nats)

        # Some at a time: a code's probability depends on those before it, and on the label.
        kept = (torch.rand(tokens.shape, generator=g) < KEPT) | null[:, None] | ~right[:, None]
        module.codes[rows] = torch.where(kept, tokens, chosen(logits, rows)).to(module.codes)

        return (weight * nats).sum() / weight.sum(), {"nats": nats[right.to(nats.device)].mean()}

    codes = data.codes
    if not (job.folder / f"{recipe.name}-likely.state.pt").exists():
        codes = _first_choice(job, net, read, data, chosen)
    train(job, f"{recipe.name}-likely", _Choosing(net, codes), loss, LIKELY)


@torch.no_grad()
def _first_choice(job: Job, net: Llama, read: _Reading, data: CodeBook, chosen: Callable[..., Tensor]) -> Tensor:
    """Codes int16 [count, N] after some rounds of choosing by the model as it is."""
    codes = data.codes.clone()
    for rows in torch.arange(len(codes)).split(100):
        tokens = codes[rows].long()
        for number in range(ROUNDS):
            with torch.autocast(job.device.type, torch.bfloat16, enabled=not job.fp32):
                logits = read(net, data.labels[rows], tokens)
            kept = torch.rand(tokens.shape, generator=generator(91, int(rows[0]) + number)) < KEPT
            tokens = torch.where(kept, tokens, chosen(logits, rows))
        codes[rows] = tokens.to(codes)
    return codes


class LikelyCodes:
    """Chooses codes near unit features that a trained raster GPT finds likely without a label."""

    def __init__(self, net: Llama, grid: int, vq: VQAutoencoder):
        self._net = net.eval().requires_grad_(False)
        self._layout, self._places = Layout.of(grid), net.positions(grid, 1)
        self._vectors = vq.quantize.unit().detach()
        self.key = float(net.output.weight.double().sum())  # of the weights, for what is kept

    def __call__(self, features: Tensor) -> Tensor:
        """The codes int64 [n, h, w] of features [n, C, h, w]."""
        rows = features.flatten(2).transpose(1, 2)
        labels = torch.full((len(rows),), self._net.config.condition_size, device=rows.device)
        spread = torch.full(rows.shape[:2], EVERYWHERE, device=rows.device)
        layout = self._layout.to(rows.device)

        tokens = (rows @ self._vectors.T).argmax(-1)
        for number in range(ROUNDS):
            logits = sequence_logits(self._net, layout, self._places, labels, tokens)
            kept = torch.rand(tokens.shape, generator=generator(91, number)).to(rows.device) < KEPT
            tokens = torch.where(kept, tokens, likely_codes(logits, rows, self._vectors, spread))

        return tokens.unflatten(1, features.shape[2:])


def save_gpt(recipe: TokenRecipe, net: Llama, out: Path) -> None:
    """Write a recipe's model with its metadata."""
    about = {"heads": recipe.config.heads, "grid": recipe.grid, "label_set": "picture-book", "decoder": "demo-vq"}
    about |= {"name": recipe.title, "defaults": defaults(recipe.grid)}
    save_checkpoint(net, out, family="llamagen", **about)
