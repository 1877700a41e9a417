"""What the demo's token models are and how each is trained on the picture book: the VQ tokenizer, the GPTs, the PAR.

One tokenizer of stride 8 serves pictures of 64 and of 128 pixels, so that a GPT on an 8 x 8 grid can draft for one on
16 x 16. The GPTs learn the codes it makes, the PAR in PAR's own order and under PAR's mask. As in ``recipes.py``, every
recipe writes one fp16 safetensors file whose metadata says all that the state dict does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...model_loaders.networks.gpt import GPT, GPTConfig, PositionTable, initialise
from ...model_loaders.networks.kl import KLAutoencoder
from ...model_loaders.networks.vq import VQAutoencoder, VQConfig
from ...samplers.tokens.par import par_groups
from . import picture_book
from .recipes import NULL_LABELS, TRAIN_SEED, pictures, reconstruction_loss, save_checkpoint, to_signed
from .training import Schedule, generator, train

# Convolution for convolution the demo's KL autoencoder, with whose weights it begins.
VQ = VQConfig(ch=32, ch_mult=(1, 1, 2, 2), blocks=1, z_channels=8, codes=512, code_channels=8, groups=8)
VQ_SCHEDULE = Schedule(steps=2200, batch=32, lr=1.5e-3, ema=0.997, weight_decay=0.0, decay=0.6)
# Sides of the pictures the tokenizer learns, in turn, and how many of each there are.
VQ_PICTURES = {64: 16000, 128: 5000}
COMMITMENT = 0.25
# A code that no position chose for so many steps is set on a feature that needs one; not in the last part of the
# training, in which the codebook has to come to rest.
PATIENCE, REVIVAL = 50, 0.6

LOW_GRID, GRID = 8, 16
# A model of this size learns 30,000 small pictures by heart, and 40,000 large ones within 10,000 steps; of 100,000 large ones
# it knows 0.05 nats a token more than of new ones after 20,000.
SMALL_PICTURES, LARGE_PICTURES = 120_000, 100_000
_CLASSES = len(picture_book.LABELS)
# What suits these models better than the full-size defaults; the command line reads it from the file. The rarest fifth of a
# distribution is where a model this small puts its mistakes (docs/benchmarks.md).
DEFAULTS = {"cfg": 1.5, "temperature": 1.0, "top_k": 0, "top_p": 0.8}
# ZipAR's window by the grid: a whole row of 8 would be the raster.
WINDOWS = {LOW_GRID: 6, GRID: 8}
# A large picture takes four times as many draws none of which must go wrong, so the LlamaGen of this grid draws more cautiously.
CAUTIOUS = {"temperature": 0.7}


def usual_defaults(grid: int) -> dict[str, float]:
    """What suits a model of discrete tokens on a ``grid`` x ``grid`` picture."""
    return {**DEFAULTS, "window": WINDOWS[grid]} if grid in WINDOWS else DEFAULTS


def defaults(grid: int) -> dict[str, float]:
    """What the file of a LlamaGen or PAR on a ``grid`` x ``grid`` picture asks for."""
    return {**usual_defaults(grid), **(CAUTIOUS if grid == GRID else {})}


def _gpt(special: int = 0) -> GPTConfig:
    return GPTConfig(
        dim=128,
        depth=6,
        heads=4,
        kv_heads=4,
        hidden=176,
        vocab=VQ.codes,
        condition="class",
        condition_size=_CLASSES,
        special=special,
    )


@dataclass(frozen=True)
class TokenRecipe:
    """A GPT on the picture book's codes.

    Attributes:
        name: names the training's state file.
        title: what a person calls the result.
        config: its shape; ``config.special`` makes it a PAR.
        grid: tokens along one side of a picture, which has 8 times as many pixels.
        schedule: length and pace.
        count: pictures it is trained on.
        reinforced: whether it then learns from its own pictures, see ``reinforce.py``.
    """

    name: str
    title: str
    config: GPTConfig
    grid: int
    schedule: Schedule
    count: int
    reinforced: bool = False


GPT_LOW = TokenRecipe(
    "llamagen-low",
    "picture book GPT, 8x8",
    _gpt(),
    LOW_GRID,
    Schedule(steps=12000, batch=64, lr=1e-3, muon_lr=2e-3, ema=0.9985, decay=0.45),
    SMALL_PICTURES,
)
GPT_HIGH = TokenRecipe(
    "llamagen",
    "picture book GPT, 16x16",
    _gpt(),
    GRID,
    Schedule(steps=30000, batch=24, lr=1e-3, muon_lr=2e-3, ema=0.9985, decay=0.45),
    LARGE_PICTURES,
    reinforced=True,
)
PAR = TokenRecipe(
    "par",
    "picture book PAR, 4 regions, 8x8",
    _gpt(special=3),
    LOW_GRID,
    Schedule(steps=12000, batch=64, lr=1e-3, muon_lr=2e-3, ema=0.9985, decay=0.45),
    SMALL_PICTURES,
)
RECIPES = {recipe.name: recipe for recipe in (GPT_LOW, GPT_HIGH, PAR)}


# ------------------------------------------------------------------------------------------------ tokenizer


class _Tokenizer(nn.Module):
    """The network in training, with how many steps ago each code was chosen."""

    def __init__(self, net: VQAutoencoder):
        super().__init__()
        self.net = net
        # All of them are overdue: the first batch fills the codebook.
        self.register_buffer("idle", torch.full((net.config.codes,), float(PATIENCE)))

    @torch.no_grad()
    def revive(self, features: Tensor, g: torch.Generator) -> int:
        """Set overdue codes on features [N, channels] of length 1, drawn at random; how many there were."""
        overdue = (self.idle >= PATIENCE).nonzero()[:, 0]
        rows = torch.randint(len(features), (len(overdue),), generator=g).to(features.device)
        self.net.quantize.embedding.weight[overdue] = features[rows]
        self.idle[overdue] = 0
        return len(overdue)

    @torch.no_grad()
    def note(self, codes: Tensor) -> None:
        """Count a step for every code that is not among ``codes``."""
        self.idle.add_(1)
        self.idle[codes.flatten()] = 0


def quantisation_loss(net: VQAutoencoder, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise with a gradient (van den Oord et al. 2017): straight through for the decoder, towards each other for the rest.

    Args:
        features: fp32 unit vectors [B, channels, h, w].

    Returns:
        Vectors [B, channels, h, w] equal to the codes', through which the decoder's gradient reaches the encoder; codes
        int64 [B, h, w]; the loss that moves codes to features, and a quarter as much features to codes.
    """
    codes = net.codes(features.detach())
    chosen = net.vectors(codes)
    loss = F.mse_loss(chosen, features.detach()) + COMMITMENT * F.mse_loss(features, chosen.detach())
    return features + (chosen - features).detach(), codes, loss


@torch.no_grad()
def begin_with(net: VQAutoencoder, kl: KLAutoencoder) -> None:
    """Give a tokenizer the convolutions of an autoencoder of the same widths and as many latent channels as a code has.

    What it computes is then the autoencoder's latents, of which quantising keeps the direction; the attention that only a
    tokenizer's deepest blocks have adds nothing yet.

    Raises:
        ValueError: the two do not fit.
    """
    own, given, deepest = net.state_dict(), kl.state_dict(), len(net.config.ch_mult) - 1
    channels = net.config.code_channels
    if given["quant_conv.weight"].shape[0] != 2 * channels or net.config.z_channels != channels:
        raise ValueError(
            f"an autoencoder of {given['quant_conv.weight'].shape[0] // 2} channels does not fit codes of {channels}"
        )
    middle = {"block_1": "0", "attn_1": "1", "block_2": "2"}
    for name, value in given.items():
        side, part, *rest = name.split(".")
        if part in ("down", "up"):
            level = rest[0] if part == "down" else str(deepest - int(rest[0]))
            name = ".".join([side, "conv_blocks", level, *(["res", *rest[2:]] if rest[1] == "block" else rest[1:])])
        elif part == "mid":
            name = ".".join([side, part, middle[rest[0]], *rest[1:]])
        elif side in ("quant_conv", "post_quant_conv") or (side, part) == ("encoder", "conv_out"):
            continue
        if own[name].shape != value.shape:
            raise ValueError(f"{name}: {tuple(value.shape)} does not fit {tuple(own[name].shape)}")
        own[name].copy_(value)
    # The mean's half of two linear layers, as one.
    mean, last = given["quant_conv.weight"][:channels, :, 0, 0], "encoder.conv_out"
    own[f"{last}.weight"].copy_(torch.einsum("oi,ichw->ochw", mean, given[f"{last}.weight"]))
    own[f"{last}.bias"].copy_(mean @ given[f"{last}.bias"] + given["quant_conv.bias"][:channels])
    own["quant_conv.weight"].copy_(torch.eye(channels)[:, :, None, None])
    own["quant_conv.bias"].zero_()
    # Code vectors have the length 1, latents of unit variance the root of their number.
    own["post_quant_conv.weight"].copy_(channels**0.5 * given["post_quant_conv.weight"])
    own["post_quant_conv.bias"].copy_(given["post_quant_conv.bias"])
    for name, value in own.items():
        if ".attn." in name and "proj_out" in name:
            value.zero_()


def train_vq(
    work: Path,
    out: Path,
    device: torch.device,
    schedule: Schedule = VQ_SCHEDULE,
    count: int | None = None,
    log: Callable[[str], None] = print,
    kl: KLAutoencoder | None = None,
) -> VQAutoencoder:
    """Train the tokenizer on small and large pictures in turn and write ``out``.

    Args:
        count: pictures of each size, instead of :data:`VQ_PICTURES`.
        kl: whose weights to begin with, see :func:`begin_with`; None begins with random ones.
    """
    data = {side: pictures(count or number, TRAIN_SEED, side, log)[0] for side, number in VQ_PICTURES.items()}
    sides = list(data)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(23)
        module = _Tokenizer(VQAutoencoder(VQ))
    if kl is not None:
        begin_with(module.net, kl)

    def loss(module: nn.Module, step: int) -> tuple[Tensor, dict[str, float]]:
        g, side = generator(29, step), sides[step % len(sides)]
        # As many pixels in a step of large pictures as in one of small ones.
        batch = max(1, schedule.batch * sides[0] ** 2 // side**2)
        x = to_signed(data[side][torch.randint(len(data[side]), (batch,), generator=g)]).to(device)
        raw = module.net.features(x)
        # In bf16 neighbouring codes would be taken for each other.
        with torch.autocast(device.type, enabled=False):
            features = F.normalize(raw.float(), dim=1)
            if step < REVIVAL * schedule.steps:
                module.revive(features.detach().permute(0, 2, 3, 1).flatten(0, 2), g)
            vectors, codes, towards = quantisation_loss(module.net, features)
        module.note(codes)
        y = module.net.render(vectors).float()
        psnr = 10 * torch.log10(4 / F.mse_loss(y.detach(), x))
        figures = {
            f"psnr{side}": float(psnr),
            "gap": float(towards.detach()),
            "idle": float((module.idle > PATIENCE / 2).sum()),
        }
        return reconstruction_loss(y, x) + towards, figures

    train("vq", module, loss, schedule, work, device, log)
    save_checkpoint(module.net, out, family="vq", groups=VQ.groups, name="picture book VQ, stride 8")
    for side in sides:
        psnr, used, perplexity = tokenizer_figures(module.net, data[side][:500], device)
        log(f"vq: {side} pixels: {psnr:.2f} dB, {used} of {VQ.codes} codes used, perplexity {perplexity:.0f}")
    return module.net


@torch.no_grad()
def tokenizer_figures(
    net: VQAutoencoder, data: Tensor, device: torch.device, chunk: int = 50
) -> tuple[float, int, float]:
    """How well pictures uint8 [N, 3, H, W] come back: PSNR in dB, codes used, and their perplexity."""
    error, counts = 0.0, torch.zeros(net.config.codes)
    for part in data.split(chunk):
        x = to_signed(part).to(device)
        _, codes = net.encode(x)
        error += float(F.mse_loss(net.decode_codes(codes).float().clamp(-1, 1), x)) * len(part)
        counts += torch.bincount(codes.flatten().cpu(), minlength=len(counts))
    share = counts[counts > 0] / counts.sum()
    psnr = 10 * torch.log10(torch.tensor(4 * len(data) / max(error, 1e-9)))
    return float(psnr), int((counts > 0).sum()), float(torch.exp(-(share * share.log()).sum()))


# ------------------------------------------------------------------------------------------------ GPT and PAR


@dataclass(frozen=True, eq=False)
class Layout:
    """How a picture's tokens stand in a training sequence of as many rows.

    Attributes:
        order: int64 [N], cells in the order in which they are decided.
        place: int64 [N], where each row stands (``networks/gpt.py``): the condition and transition tokens at -1.
        mask: bool [N, N], True where a row sees another; None is causal.
    """

    order: Tensor
    place: Tensor
    mask: Tensor | None

    @staticmethod
    def of(grid: int, regions: int = 1) -> Layout:
        """Raster order, or PAR's (arXiv 2412.15119) for ``regions`` above 1, a square whose root divides ``grid``.

        PAR's rows are: condition, the first token of every region, ``regions - 1`` transition tokens, then all groups but
        the last. Row i predicts token i of the order: the initial tokens one another, and every later group the next.
        """
        n, count, nowhere = regions, grid * grid, torch.tensor([-1])
        if n == 1:
            order = torch.arange(count)
            return Layout(order, torch.cat([nowhere, order[:-1]]), None)
        order = torch.tensor(par_groups(grid, n)).flatten()
        place = torch.cat([nowhere, order[:n], nowhere.expand(n - 1), order[n:-n]])
        row = torch.arange(count)
        # From the last initial token on, rows see to the end of their own group.
        group = torch.where(row < n, -row - 1, (row - n) // n)
        return Layout(order, place, (row[:, None] >= row) | (group[:, None] == group))

    def to(self, device: torch.device) -> Layout:
        """The same on ``device``."""
        return Layout(self.order.to(device), self.place.to(device), None if self.mask is None else self.mask.to(device))


def sequence_logits(net: GPT, layout: Layout, places: PositionTable, labels: Tensor, tokens: Tensor) -> Tensor:
    """What every row of whole sequences predicts.

    Args:
        layout, places: of the picture's grid, behind a prefix of one row.
        labels: int64 [B]; the number of classes means "no label".
        tokens: int64 [B, N] in the layout's order.

    Returns:
        fp32 [B, N, V]; entry i is about token i.
    """
    known, n = net.embed(tokens), net.config.regions
    parts = [known[:, :-1]]
    if n > 1:
        parts = [known[:, :n], net.special_rows().expand(len(tokens), -1, -1), known[:, n:-n]]
    return net(torch.cat([net.prefix(labels), *parts], dim=1), layout.place, places, layout.mask)


@torch.no_grad()
def code_book(
    vq: VQAutoencoder, count: int, grid: int, device: torch.device, log: Callable[[str], None] = print, chunk: int = 500
) -> tuple[Tensor, Tensor]:
    """Codes int16 [count, grid * grid] of the training book's pictures in raster order, and their labels int64 [count]."""
    side = grid * vq.config.stride
    codes, labels = torch.empty(count, grid * grid, dtype=torch.int16), torch.empty(count, dtype=torch.int64)
    for at in range(0, count, chunk):
        # Drawn and encoded piece by piece: the pictures themselves would take gigabytes.
        s = picture_book.scenes(TRAIN_SEED, min(chunk, count - at), at)
        rgb = torch.from_numpy(picture_book.render(s, side)[0]).permute(0, 3, 1, 2)
        made = [vq.encode(to_signed(part).to(device))[1].flatten(1) for part in rgb.split(50)]
        codes[at : at + len(s)] = torch.cat(made).to("cpu", torch.int16)
        labels[at : at + len(s)] = torch.from_numpy(s.label)
        if at % (20 * chunk) == 0:
            log(f"drawing and encoding the picture book: {at}/{count}")
    return codes, labels


def train_gpt(
    recipe: TokenRecipe,
    vq: VQAutoencoder,
    work: Path,
    out: Path,
    device: torch.device,
    schedule: Schedule | None = None,
    count: int | None = None,
    log: Callable[[str], None] = print,
    start: GPT | None = None,
) -> GPT:
    """Train a GPT or PAR on the tokenizer's codes and write ``out``.

    Args:
        vq: the tokenizer, as it will be shipped (loaded from its fp16 file).
        schedule, count: instead of the recipe's.
        start: weights to begin with (a trained model to be improved); None begins with random ones.
    """
    config, schedule, count = recipe.config, schedule or recipe.schedule, count or recipe.count
    book, labels = code_book(vq, count, recipe.grid, device, log)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(31)
        net = initialise(GPT(config)).to(device)
    if start is not None:
        net.load_state_dict(start.state_dict())
    layout, places = Layout.of(recipe.grid, config.regions).to(device), net.positions(recipe.grid, 1)
    book = book[:, layout.order.cpu()]

    def loss(module: nn.Module, step: int) -> tuple[Tensor, dict[str, float]]:
        g = generator(37, step)
        rows = torch.randint(count, (schedule.batch,), generator=g)
        null = torch.rand(len(rows), generator=g) < NULL_LABELS
        tokens, what = book[rows].long().to(device), labels[rows].masked_fill(null, config.condition_size).to(device)
        logits = sequence_logits(module, layout, places, what, tokens)
        nats = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        right = (logits.detach().argmax(-1) == tokens).float().mean()
        return nats, {"nats": float(nats.detach()), "right": float(right)}

    train(recipe.name, net, loss, schedule, work, device, log)
    save_gpt(recipe, net, out)
    return net


def save_gpt(recipe: TokenRecipe, net: GPT, out: Path) -> None:
    """Write a recipe's model with all that its file says of it."""
    save_checkpoint(
        net,
        out,
        family="llamagen",
        heads=recipe.config.heads,
        grid=recipe.grid,
        label_set="picture-book",
        decoder="demo-vq",
        name=recipe.title,
        defaults=defaults(recipe.grid),
    )
