"""What all samplers of discrete tokens share: a run, its prefill, one pass, guidance and the draw of a token."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import UserError
from ...model_loaders.networks import ops
from ...model_loaders.networks.janus import JanusModel
from ...model_loaders.networks.llama import Cache, Llama, TokenModel
from ...model_loaders.networks.tar import TarModel
from ...reports.record import GIVEN, Clock, Report
from ..conditioning import AnyCondition
from ..editing import Edit
from .conditioning import PreparedCondition, prepare
from .draws import PairedDraws, draw, penalised
from .schedule import Schedule
from .settings import TokenSettings

S = TypeVar("S", bound=TokenSettings)


@dataclass(frozen=True, eq=False)
class TokenStep:
    """The partial result that a token sampler yields after every pass."""

    # done, total: passes of the transformer
    done: int
    total: int
    codes: Tensor  # int64 [B, G, G] so far; 0 where undecided
    decided: Tensor  # bool [B, G, G]
    report: Report  # the running report (its counts so far)


class TokenSampled(NamedTuple):
    """Result of a token sampler: codes int64 [B, G, G] and the report."""

    codes: Tensor
    report: Report


TokenSampler = Generator[TokenStep, None, TokenSampled]


@dataclass(eq=False)
class TokenRun:
    """State of one generation. A sampler calls ``begin``, :meth:`step` and :meth:`finish` as one of the masked family (``mar/loop.py``).

    With guidance, a pass has R = 2 B batch rows: the condition's, then the null condition's, which are left out if ``null`` is False.
    """

    net: Llama  # the network
    grid: int  # side of the grid; N = grid ** 2 cells
    condition: PreparedCondition  # the packed condition
    settings: TokenSettings  # with the model's own values in place
    draws: PairedDraws  # random numbers of B images
    report: Report
    clock: Clock
    # tokens, decided: int64 and bool [B, N + 1]; the last column receives the padding of passes in which images differ
    tokens: Tensor = field(init=False)
    decided: Tensor = field(init=False)
    given: Tensor | None = None  # int64 [B, N + 1], tokens that an edit keeps, -1 for the others; None without an edit
    stream: str = "token"  # stream of the random numbers
    span: tuple[int, int] | None = None  # token values that are image codes, half-open; None: all
    penalty: float = 1.0  # repetition penalty; 1 is none
    phases: tuple[str, str] = ("transformer", "sampling")  # names of the time spent in the transformer and in drawing

    def __post_init__(self) -> None:
        self.tokens = torch.zeros(len(self.draws), self.count + 1, dtype=torch.int64, device=self.device)
        self.decided = torch.zeros_like(self.tokens, dtype=torch.bool)

    @property
    def count(self) -> int:
        """Cells N."""
        return self.grid**2

    @property
    def device(self) -> torch.device:
        return self.net.compute_device

    def guided(self, schedule: Schedule) -> list[bool]:
        """For each pass whether guidance is applied."""
        s = self.settings
        return [s.cfg > 1 and (s.cfg_interval < 0 or p.clock <= s.cfg_interval) for p in schedule.passes]

    def codes(self) -> Tensor:
        """The tokens so far, int64 [B, G, G]; 0 where undecided."""
        return torch.where(self.decided[:, :-1], self.tokens[:, :-1], 0).view(-1, self.grid, self.grid)

    def step(self, done: int, total: int) -> TokenStep:
        """The partial result."""
        decided = self.decided[:, :-1].clone().view(-1, self.grid, self.grid)
        return TokenStep(done, total, self.codes(), decided, self.report)

    def finish(self, step: np.ndarray, outcome: np.ndarray) -> TokenSampled:
        """Stop the clock; returns the result. Maps [B, G, G]: pass at which a cell was decided, int32, and its outcome, uint8."""
        self.report.maps |= {"step": step, "outcome": outcome}
        if self.given is not None:
            given = (self.given[:, :-1] >= 0).view(step.shape).cpu().numpy()
            step[given] = -1
            outcome[given] = GIVEN
        codes = self.codes()
        self.clock.stop(self.report)
        return TokenSampled(codes, self.report)


def begin(
    name: str,
    model: TokenModel,
    condition: AnyCondition,
    settings: TokenSettings,
    draws: PairedDraws,
    seed: int | None,
    edit: Edit | None = None,
) -> TokenRun:
    """Check the inputs and set up a generation.

    Raises:
        UserError: a condition or an edit that does not fit the model, or draws for another number of images.
    """
    prepared, settings = prepare(model, condition, model.net.compute_device), resolve(settings, model)
    if len(draws) != len(condition):
        raise UserError(f"condition: it asks for {len(condition)} images, the draws are for {len(draws)}.")
    report, clock = new_report(name, model, settings, seed, len(condition))
    given = None if edit is None else given_tokens(edit, model.grid, len(condition)).to(model.net.compute_device)
    return TokenRun(model.net, model.grid, prepared, settings, draws, report, clock, given)


def given_tokens(edit: Edit, grid: int, images: int) -> Tensor:
    """The tokens that an edit keeps, int64 [B, N + 1] as :class:`TokenRun` holds them.

    Raises:
        UserError: see :meth:`Edit.token_mask`; codes of another grid.
    """
    codes = edit.start
    if tuple(codes.shape[1:]) != (grid, grid):
        raise UserError(
            f"latent: it has {codes.shape[1]} x {codes.shape[2]} tokens, the model draws {grid} x {grid}; encode a picture of the model's "
            "own size with VAE Encode and the vae of the same loader."
        )
    again = edit.token_mask(grid, images, codes.device)
    return F.pad(torch.where(again, -1, codes.flatten(1)), (0, 1), value=-1)


def new_report(
    name: str, model: TokenModel | TarModel, settings: object, seed: int | None, images: int
) -> tuple[Report, Clock]:
    """Report and clock of a run that begins now."""
    net, device = model.net, model.net.compute_device
    report = Report(name, model.name, asdict(settings), seed, images, device.type)  # type: ignore[call-overload]
    report.note = "; ".join(filter(None, (ops.remark(net), net.remark)))
    return report, Clock(device)


# ------------------------------------------------------------------------------------------------ one pass


def prefill(run: TokenRun, null: bool, slots: int, image: Tensor | None = None) -> tuple[Tensor, Cache]:
    """Run the condition, alone or with the cells ``image`` int64 [B, m] behind it.

    Returns hidden rows [R, 1 + m, C], of which row i predicts cell i, and the cache with ``slots`` image slots.
    """
    given, net, times = run.condition, run.net, 1 + null
    rows = net.prefix(given.condition, given.lengths, guided=null)
    lengths = None if given.lengths is None else given.lengths.repeat(times)
    x = None if image is None else net.tok_embeddings(image).repeat(times, 1, 1)
    fed = rows.shape[1] + (0 if image is None else image.shape[1])
    run.report.add(transformer_passes=1, transformer_tokens=len(rows) * fed)
    hidden, cache = net.prefill(rows, run.grid, slots, lengths, x)
    if given.images is not None:
        hidden = hidden[given.images]
        cache.keep(given.images)
    run.report.add(cache_bytes=cache.bytes)
    return hidden, cache


def feed(
    run: TokenRun,
    cache: Cache,
    fed: Tensor,
    position: Tensor,
    slot: Tensor,
    null: bool,
    end: int,
    mask: Tensor | None = None,
) -> Tensor:
    """Hidden rows [R, m, C] of a pass after the first, which feeds tokens of the run.

    Args:
        fed: cells int64 [m], or [B, m] if images differ; N + 1 + i for transition token i.
        position, slot: int64 of the same shape; slots are counted with the prefix.
        end, mask: as for :meth:`Llama.feed`; mask bool [m, end] or [B, m, end].
    """
    cells = fed.clamp(max=run.count)
    ids = run.tokens[:, cells] if fed.ndim == 1 else run.tokens.gather(1, cells)
    x = run.net.tok_embeddings(ids if run.span is None else ids + run.span[0])
    if run.net.config.special:
        number = fed - run.count - 1
        x = torch.where(
            number[..., None] >= 0, run.net.spe_tok_embeddings["special_embeddings"](number.clamp(min=0)), x
        )
    if null:
        x = torch.cat([x, x])
        if position.ndim == 2:
            position, slot = torch.cat([position, position]), torch.cat([slot, slot])
            mask = None if mask is None else torch.cat([mask, mask])
    run.report.add(transformer_passes=1, transformer_tokens=x.shape[0] * x.shape[1])
    return run.net.feed(x, position, slot, cache, end, mask)


def guide(run: TokenRun, hidden: Tensor, guided: bool | Tensor) -> Tensor:
    """Classifier-free guidance: hidden rows [R, m, C] to logits [B, m, V]; ``guided``: of all tokens, or bool [m] or [B, m]."""
    logits = run.net.logits(hidden, run.span)
    cond, null = logits[: len(run.tokens)], logits[len(run.tokens) :]
    if guided is False or not len(null):
        return cond
    mixed = torch.add(null, cond - null, alpha=run.settings.cfg)  # null + cfg (cond - null)
    return mixed if guided is True else torch.where(guided[..., None], mixed, cond)


def decide(run: TokenRun, cells: Tensor, hidden: Tensor, guided: bool) -> None:
    """Draw the tokens of cells int64 [m] that the hidden rows [R, m, C] predict."""
    run.tokens.index_copy_(1, cells, sample(run, guide(run, hidden, guided), cells))
    run.decided.index_fill_(1, cells, True)


def sample(run: TokenRun, logits: Tensor, cells: Tensor) -> Tensor:
    """Token values int64 [B, m] of cells int64 [m] or [B, m] from their logits fp32 [B, m, V]."""
    if run.penalty != 1:  # of the tokens before each cell, guesses among them
        codes = run.tokens[:, None, :-1]
        before = (torch.arange(run.count, device=cells.device) < cells[..., None]).expand(len(codes), -1, -1)
        times = torch.zeros(logits.shape, dtype=torch.int32, device=cells.device)
        times.scatter_add_(2, codes.expand_as(before), before.to(times.dtype))
        logits = penalised(logits, times > 0, run.penalty)
    tokens = draw(logits, run.settings, run.draws.gumbel(run.stream, cells, logits.shape[-1]))
    if run.given is None:
        return tokens
    given = run.given[:, cells] if cells.ndim == 1 else run.given.gather(1, cells)
    return torch.where(given >= 0, given, tokens)  # a given token stands in its cell whatever is drawn for it


# ------------------------------------------------------------------------------------------------ settings of a model

# Published guidance and top-k by kind of condition: LlamaGen's for classes and text, Tar's for features, Janus' for prompts.
_PUBLISHED = {"class": (4.0, 2000), "text": (7.5, 1000), "features": (4.0, 0), "prompt": (5.0, 0)}
# PAR's guidance by width and regions (XL-4x, XXL-4x, 3B-4x, 3B-16x); all values can be drawn.
_PUBLISHED_PAR = {(1280, 4): 1.5, (1536, 4): 1.435, (3200, 4): 1.345, (3200, 16): 1.5}


def published(model: TokenModel) -> dict[str, Any]:
    """Published sampling settings of a model: "cfg" and "top_k"."""
    c = model.net.config
    cfg, top_k = _PUBLISHED[c.condition]
    par = _PUBLISHED_PAR.get((c.dim, c.regions))
    return {"cfg": par or cfg, "top_k": 0 if par else top_k}


def resolve(settings: S, model: TokenModel) -> S:
    """The settings with the model's published values for ``cfg`` 0 and ``top_k`` -1."""
    own, top_k = published(model), settings.top_k
    return replace(settings, cfg=settings.cfg or own["cfg"], top_k=own["top_k"] if top_k < 0 else top_k)


def raster_only(name: str, *models: TokenModel, janus: str = "") -> None:
    """Raises UserError if one of the models was trained in PAR's order, or is a Janus, against which ``janus`` speaks ("" is nothing)."""
    for model in models:
        if model.regions > 1:
            why = f"{model.name} was trained in PAR's order, which {name} does not follow"
            raise UserError(f"model: {why}; use the PAR Sampler.")
        if janus and isinstance(model, JanusModel):
            what = f"{model.name} is a Janus, and {name} {janus}"
            raise UserError(f"model: {what}; use the LlamaGen Sampler or the ZipAR Sampler.")
