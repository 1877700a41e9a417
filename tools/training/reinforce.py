"""The last stage of the large LlamaGen: it learns from its own pictures which of their tokens did not go together.

Teacher forcing asks for every token behind a real beginning. When it draws, a model of this size stands behind its own, and
where a thing begins, whose place, size and colour are settled token by token, it contradicts itself (docs/benchmarks.md). So
here it draws pictures, a *critic* reads which scene each of them shows, and tokens behind which a picture came nearer to that
scene than the others of its class become likelier: REINFORCE (Williams 1992) with the mean of the others taken off (Kool et al. 2019).

What it learns from is drawn from its whole distribution; an artist draws with guidance, and without the rarest tokens, which
makes rare scenes rarer. So how often a scene is drawn is counted on pictures drawn as the file asks for.

The critic is a judge in all but name, with weights, seed and training pictures of its own. The judge that the figures are
made with has no part in any training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...model_loaders.networks.gpt import GPT, PositionTable, TokenModel
from ...model_loaders.networks.vq import VQAutoencoder
from ...samplers.conditioning import from_ids
from ...samplers.driver import finish
from ...samplers.tokens.draws import PairedDraws
from ...samplers.tokens.llamagen import llamagen
from ...samplers.tokens.settings import LlamaGenSettings
from . import picture_book
from .judge import Judge, attributes, placed, read, reading_loss
from .picture_book import Scenes
from .quality import shrunk
from .recipes import RESOLUTION, TRAIN_SEED, to_rgb, to_signed
from .redraw import redraw_map
from .token_recipes import Layout, TokenRecipe, code_book, defaults, save_gpt, sequence_logits
from .training import Schedule, generator, train

CRITIC_SCHEDULE = Schedule(steps=5000, batch=64, lr=2e-3, ema=0.995, weight_decay=0.01, decay=0.5)
CRITIC_PICTURES = 5000
# At most so large a share of a picture's tokens is what the model guessed there.
SLIPS = 0.4
SCHEDULE = Schedule(steps=1400, batch=160, lr=3e-4, warmup=20, decay=0.45, ema=0.98, weight_decay=0.0)
# The error, in units of this, that a picture is off by; about the judge's tolerance. More than MOST counts as MOST.
UNIT, MOST = 0.082, 3.0
# Beside the error: another class than the one asked for, the critic calling the thing whole, and a scene that is drawn less often
# than it stands in the book.
WRONG, WHOLE, VARIETY = 1.5, 1.2, 0.6
# Pictures a step that are drawn as the file asks for, to count what they show.
COUNTED = 40
# Real pictures a step, the weight of their nats, and how many of them come without a label. They keep what the model
# knows of the book, and its prediction without a label.
REAL_BATCH, REAL, NULL = 40, 0.3, 0.3
ADVANTAGE = 4.0
# How much each step still remembers of how often an attribute was drawn before it.
MEMORY = 0.95
ATTRIBUTES = {
    "colour": len(picture_book.COLOURS),
    "time": len(picture_book.TIMES),
    "parts": picture_book.PARTS,
    "place": len(picture_book.PLACES),
    "size": len(picture_book.SIZES),
}
# Pictures that the memory holds, as it were.
_CLASSES, _SEEN = len(picture_book.LABELS), 300


# ------------------------------------------------------------------------------------------------ critic


@torch.no_grad()
def slipped(
    net: GPT, layout: Layout, places: PositionTable, labels: Tensor, codes: Tensor, most: float, g: torch.Generator
) -> Tensor:
    """Codes int64 [B, N] with some of them replaced, in two rounds, by what the model draws there behind the others.

    Args:
        most: up to so large a share of a picture's codes, a different one for every picture.
    """
    share = most * torch.rand(len(codes), 1, generator=g).to(codes.device)
    for _ in range(2):
        logits = sequence_logits(net, layout, places, labels, codes)
        noise = torch.empty(logits.shape).exponential_(generator=g).log().to(codes.device)
        swap = torch.rand(codes.shape, generator=g).to(codes.device) < share / 2
        codes = torch.where(swap, (logits - noise).argmax(-1), codes)
    return codes


def exchanged(codes: Tensor, labels: Tensor, g: torch.Generator) -> Tensor:
    """Codes [N, G, G] with a block of each from another picture of the class, if there is one."""
    n, side = len(codes), codes.shape[-1]
    out, other = codes.clone(), torch.arange(n)
    for label in labels.unique():
        rows = (labels == label).nonzero()[:, 0]
        rows = rows[torch.randperm(len(rows), generator=g)]
        other[rows] = rows.roll(1)
    for i in range(n):
        h, w = (int(v) for v in torch.randint(side // 5, side * 5 // 8 + 1, (2,), generator=g))
        # Below the first rows, which are sky.
        top = int(torch.randint(min(2, side - h), side - h + 1, (1,), generator=g))
        left = int(torch.randint(0, side - w + 1, (1,), generator=g))
        out[i, top : top + h, left : left + w] = codes[other[i], top : top + h, left : left + w]
    return out


@torch.no_grad()
def drawn(vq: VQAutoencoder, codes: Tensor, chunk: int = 20) -> Tensor:
    """Pictures of codes int64 [N, G, G] as a judge sees them: uint8 [N, 3, 64, 64] on the CPU."""
    device = next(vq.parameters()).device
    rgb = np.concatenate([to_rgb(vq.decode_codes(part.to(device))) for part in codes.split(chunk)])
    return torch.from_numpy(shrunk(rgb)).permute(0, 3, 1, 2)


def train_critic(
    net: GPT,
    grid: int,
    vq: VQAutoencoder,
    work: Path,
    device: torch.device,
    schedule: Schedule = CRITIC_SCHEDULE,
    count: int = CRITIC_PICTURES,
    log: Callable[[str], None] = print,
) -> Judge:
    """Train a critic of what ``net`` draws on a ``grid`` x ``grid`` picture: clean pictures, ones that only went through the
    tokenizer, ones with slips of the model's own, all of which it has to read, and ones with a foreign block in them, which
    it has to recognise."""
    codes, labels = code_book(vq, count, grid, device, log)
    layout, places, g = Layout.of(grid).to(device), net.positions(grid, 1), generator(71, 0)

    def slip(at: int) -> Tensor:
        rows = slice(at, at + 100)
        return slipped(net, layout, places, labels[rows].to(device), codes[rows].long().to(device), SLIPS, g).cpu()

    whole = codes.long().unflatten(1, (grid, grid))
    kinds = [whole, *(torch.cat([slip(at) for at in range(0, count, 100)]).view_as(whole) for _ in range(2))]
    log("critic: slips made")
    scenes = picture_book.scenes(TRAIN_SEED, count)
    clean = torch.from_numpy(picture_book.render(scenes, RESOLUTION)[0]).permute(0, 3, 1, 2)
    good, broken = torch.stack([clean, *(drawn(vq, kind) for kind in kinds)]), drawn(vq, exchanged(whole, labels, g))
    log("critic: pictures ready")
    truth, where = attributes(scenes), placed(scenes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(505)
        critic = Judge()

    def loss(module: nn.Module, step: int) -> tuple[Tensor, dict[str, float]]:
        g = generator(72, step)
        row = torch.randint(count, (schedule.batch,), generator=g)
        kind = torch.randint(len(good), (schedule.batch,), generator=g)
        spoilt = torch.arange(schedule.batch) % 4 == 3
        x = torch.where(spoilt[:, None, None, None], broken[row], good[kind, row])
        _, out = module(to_signed(x).to(device))
        known, readable = {k: t[row].to(device) for k, t in truth.items()}, ~spoilt.to(device)
        return reading_loss(out, known, where[row].to(device), readable, readable)

    train("critic", critic, loss, schedule, work, device, log)
    return critic


# ------------------------------------------------------------------------------------------------ what a picture is worth


@dataclass(frozen=True)
class Marks:
    """What a critic says of B pictures.

    Attributes:
        errors: fp32 [B, G], each row of cells' part of the redraw error, in units of :data:`UNIT`; at most :data:`MOST` a picture.
        live: bool [B, G], rows whose tokens can still change the thing: it reaches them, or the row above.
        right: bool [B], it shows the class asked for.
        whole: fp32 [B], probability that the thing is whole.
        scenes: as read.
    """

    errors: Tensor
    live: Tensor
    right: Tensor
    whole: Tensor
    scenes: Scenes


def marks(critic: Judge, rgb: np.ndarray, labels: Tensor, grid: int) -> Marks:
    """Have pictures uint8 [B, 64, 64, 3] on a grid of ``grid`` rows read that were asked for as ``labels`` int64 [B]."""
    verdict = read(critic, rgb)
    error, cover = (torch.from_numpy(m).unflatten(1, (grid, -1)).sum((2, 3)) for m in redraw_map(rgb, verdict.scenes))
    errors = error / cover.sum(1, keepdim=True).clamp(min=1) / UNIT
    errors = errors * (MOST / errors.sum(1, keepdim=True).clamp(min=MOST))
    right = torch.from_numpy(verdict.scenes.label) == labels
    return Marks(
        errors,
        _from_above((cover > 1).flip(1).cummax(1).values.flip(1)),
        right,
        torch.from_numpy(verdict.whole),
        verdict.scenes,
    )


def _from_above(rows: Tensor) -> Tensor:
    """Rows [B, G] moved down by one; the first stays. A token also shows in the row of pixels above it."""
    return torch.cat([rows[:, :1], rows[:, :-1]], 1)


def to_go(errors: Tensor) -> Tensor:
    """Errors by row [B, G] to what comes from each row on, [B, G], counting the row above it."""
    return _from_above(errors.flip(1).cumsum(1).flip(1))


def values(s: Scenes) -> Tensor:
    """The attributes of N scenes, one-hot side by side, fp32 [N, values of all attributes]."""
    return torch.cat([F.one_hot(torch.from_numpy(getattr(s, name)), n) for name, n in ATTRIBUTES.items()], 1).float()


def counted(labels: Tensor, s: Scenes) -> Tensor:
    """How often each value of each attribute stands among pictures of each class, fp32 [classes, values]."""
    return F.one_hot(labels, _CLASSES).float().T @ values(s)


def log_shares(counts: Tensor) -> Tensor:
    """Logarithm of the share of every value within its attribute, [classes, values]; very rare ones are not told apart."""
    parts = counts.split(list(ATTRIBUTES.values()), 1)
    return torch.cat([(part / part.sum(1, keepdim=True).clamp(min=1e-6) + 0.003).log() for part in parts], 1)


def beside_others(returns: Tensor, labels: Tensor) -> Tensor:
    """Returns [B, G] less the mean of the batch's other pictures of the class; of a single one nothing is left."""
    by = F.one_hot(labels, _CLASSES).float()
    others = (by.sum(0) - 1)[labels, None]
    rest = (by.T @ returns)[labels] - returns
    return torch.where(others > 0, returns - rest / others.clamp(min=1), 0.0)


class Learner(nn.Module):
    """A GPT and what it has drawn so far.

    Attributes:
        seen: how often each value of each attribute was drawn, fp32 [classes, values], forgetting.
    """

    def __init__(self, net: GPT):
        super().__init__()
        self.net = net
        s = picture_book.scenes(TRAIN_SEED, 20_000)
        book = counted(torch.from_numpy(s.label), s)
        self.register_buffer("book", log_shares(book), persistent=False)
        self.register_buffer("seen", book * (_SEEN / len(s)))

    def note(self, labels: Tensor, s: Scenes) -> float:
        """Count scenes that were drawn for ``labels`` int64 [B].

        Returns:
            How far what is drawn lies from the book: Kullback-Leibler, in nats, the mean of classes, the sum of attributes.
        """
        self.seen.mul_(MEMORY).add_(counted(labels, s).to(self.seen.device) * ((1 - MEMORY) * _SEEN / len(labels)))
        return float((self.book.exp() * (self.book - log_shares(self.seen))).sum(1).mean())

    @torch.no_grad()
    def advantages(self, m: Marks, labels: Tensor) -> Tensor:
        """How much better than others the pictures are from each row on.

        Args:
            m: marks of B pictures; labels: int64 [B], what they were asked for.

        Returns:
            fp32 [B, G], at about unit variance, 0 where nothing can be changed any more.
        """
        rare = (self.book - log_shares(self.seen)).cpu()
        variety = (values(m.scenes) * rare.clamp(-1.5, 1.5)[labels]).sum(1)
        once = WHOLE * m.whole - WRONG * (~m.right).float() + VARIETY * variety
        live = m.live.float()
        advantage = beside_others(once[:, None] - to_go(m.errors), labels) * live
        spread = (advantage.square().sum() / live.sum().clamp(min=1)).sqrt().clamp(min=1e-6)
        return (advantage / spread).clamp(-ADVANTAGE, ADVANTAGE)


# ------------------------------------------------------------------------------------------------ training


def reinforce(
    recipe: TokenRecipe,
    start: GPT,
    vq: VQAutoencoder,
    critic: Judge,
    work: Path,
    out: Path,
    device: torch.device,
    schedule: Schedule = SCHEDULE,
    count: int | None = None,
    log: Callable[[str], None] = print,
) -> GPT:
    """Train a LlamaGen on pictures it draws, and on real ones beside them, and write ``out``.

    Its own pictures are drawn without guidance, at temperature 1, from the whole distribution; beside them some as the file asks for,
    which only count.

    Args:
        recipe: what it is.
        start: the model as teacher forcing left it; it keeps its weights.
        vq: its tokenizer.
        critic: reads what it drew, see :func:`train_critic`.
        schedule: ``batch`` is how many pictures it draws a step.
        count: real pictures, instead of the recipe's.
    """
    grid, config = recipe.grid, recipe.config
    count = count or recipe.count
    book, kinds = code_book(vq, count, grid, device, log)
    net = GPT(config).to(device)
    net.load_state_dict(start.state_dict())
    layout, places = Layout.of(grid).to(device), net.positions(grid, 1)
    plain = LlamaGenSettings(cfg=1.0, temperature=1.0, top_k=0, top_p=1.0)
    usual = LlamaGenSettings(**{name: value for name, value in defaults(grid).items() if name != "window"})
    labels, few = torch.arange(schedule.batch) % _CLASSES, torch.arange(COUNTED) % _CLASSES

    def own(net: GPT, what: Tensor, settings: LlamaGenSettings, seed: int, step: int) -> tuple[Tensor, Marks]:
        """Codes [B, G, G] of new pictures of ``what``, and what the critic says of them."""
        with torch.autocast(device.type, enabled=False), torch.no_grad():
            draws = PairedDraws(seed, range(step * len(what), (step + 1) * len(what)))
            codes = finish(
                llamagen(TokenModel(net, recipe.title, grid), from_ids(what.tolist()), settings, draws)
            ).codes
            return codes, marks(critic, drawn(vq, codes).permute(0, 2, 3, 1).numpy(), what, grid)

    def loss(module: nn.Module, step: int) -> tuple[Tensor, dict[str, float]]:
        _, asked = own(module.net, few, usual, 917, step)
        apart = module.note(few, asked.scenes)
        codes, m = own(module.net, labels, plain, 911, step)
        advantage = module.advantages(m, labels)
        tokens, weight = codes.flatten(1), advantage.repeat_interleave(grid, 1).to(device)
        g = generator(913, step)
        rows = torch.randint(count, (REAL_BATCH,), generator=g)
        null = torch.rand(REAL_BATCH, generator=g) < NULL
        real, what = book[rows].long().to(device), kinds[rows].masked_fill(null, config.condition_size).to(device)

        def nats(what: Tensor, tokens: Tensor) -> Tensor:
            logits = sequence_logits(module.net, layout, places, what, tokens)
            return F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none").view_as(tokens)

        known = nats(what, real).mean()
        value = (weight * nats(labels.to(device), tokens)).mean() + REAL * known
        good, better = (marked.right & (marked.errors.sum(1) <= 1) for marked in (m, asked))
        return value, {
            "right": float(m.right.float().mean()),
            "scenes": float(good.float().mean()),
            "whole": float(m.whole.mean()),
            "as asked": float(better.float().mean()),
            "apart": apart,
            "nats": float(known.detach()),
        }

    learner = Learner(net)
    train(f"{recipe.name}-reinforce", learner, loss, schedule, work, device, log)
    save_gpt(recipe, learner.net, out)
    return learner.net
