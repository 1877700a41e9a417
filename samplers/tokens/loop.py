"""What all samplers of discrete tokens share: a run, its prefill, one pass, guidance and the draw of a token."""

from __future__ import annotations

from collections.abc import Generator
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import UserError, not_finite
from ...model_loaders.networks import ops
from ...model_loaders.networks.janus import JanusModel
from ...model_loaders.networks.llama import Cache, Llama, TokenModel
from ...model_loaders.networks.tar import TarModel
from ...reports.record import GIVEN, Clock, Report, dtype_of
from ..conditioning import AnyCondition
from ..driver import to_device
from ..editing import Edit, edit_digests
from .conditioning import PreparedCondition, prepare
from .draws import PairedDraws, draw, penalised
from .schedule import Schedule
from .settings import TokenSettings, guides

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
    """State of one generation. A sampler calls ``begin``, :meth:`step` and :meth:`finish` as one of the masked family
    (``mar/loop.py``).

    With guidance, a pass has R = 2 B batch rows: the condition's, then the null condition's, which are left out if
    ``null`` is False.
    """

    net: Llama  # the network
    grid: int  # side of the grid; N = grid ** 2 cells
    condition: PreparedCondition  # the packed condition
    settings: TokenSettings  # with the model's own values in place
    draws: PairedDraws  # random numbers of B images
    report: Report
    clock: Clock
    given: Tensor | None = None  # int64 [B, N + 1], tokens that an edit keeps, -1 for the others; None without an edit
    stream: str = "token"  # stream of the random numbers
    span: tuple[int, int] | None = None  # token values that are image codes, half-open; None: all
    penalty: float = 1.0  # repetition penalty; 1 is none
    rows: int = 0  # rows of an image that every pass is padded to, see one_shape in networks/llama.py; 0: none
    phases: tuple[str, str] = ("transformer", "sampling")  # names of the time spent in the transformer and in drawing

    # tokens, decided: int64 and bool [B, N + 1]; the last column receives the padding of passes in which images differ
    tokens: Tensor = field(init=False)
    decided: Tensor = field(init=False)
    # fp32 [] each: of every pass the largest absolute value of its logits, and the norm of the rows that they were
    # computed from. A single number that is NaN or infinite makes them so.
    norms: list[Tensor] = field(init=False, default_factory=list)

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
        return [bool(guidance_applies(self.settings, p.cfg_step)) for p in schedule.passes]

    def codes(self) -> Tensor:
        """The tokens so far, int64 [B, G, G]; 0 where undecided."""
        return (self.tokens * self.decided)[:, :-1].view(-1, self.grid, self.grid)

    def of(self, images: np.ndarray) -> TokenRun:
        """Some images int64 [L] of this run, with copies of their tokens. Report, clock and the check of logits are
        shared.
        """
        index = to_device(images, self.device)

        part = copy(self)
        part.draws = self.draws.of(images.tolist())
        part.tokens = self.tokens[index]
        part.decided = self.decided[index]
        part.given = None if self.given is None else self.given[index]
        return part

    def step(self, done: int, total: int) -> TokenStep:
        """The partial result."""
        decided = self.decided[:, :-1].clone().view(-1, self.grid, self.grid)
        return TokenStep(done, total, self.codes(), decided, self.report)

    def check_logits(self, field: str, name: str) -> None:
        """Check all logits so far, once, at the end: the host waits for the device here.

        Args:
            field: the input of the model, for the message.
            name: the model's name.

        Raises:
            UserError: a logit was NaN or infinite.
        """
        if self.norms and not np.isfinite(torch.stack(self.norms).cpu().numpy()).all():
            raise not_finite(field, name, "logits")

    def finish(self, step: np.ndarray, outcome: np.ndarray) -> TokenSampled:
        """Stop the clock; returns the result.

        Args:
            step: int32 [B, G, G], pass at which a cell was decided. Given cells are set to -1.
            outcome: uint8 [B, G, G], see ``reports/record.py``. Given cells are set to GIVEN.

        Raises:
            UserError: logits that were not finite.
        """
        self.report.maps |= {"step": step, "outcome": outcome}
        if self.given is not None:
            given = (self.given[:, :-1] >= 0).view(step.shape).cpu().numpy()
            step[given] = -1
            outcome[given] = GIVEN

        codes = self.codes()
        self.clock.stop(self.report)
        self.report.remark(self.net.remark)
        self.check_logits("model", self.report.model)
        return TokenSampled(codes, self.report)


def begin(
    name: str,
    model: TokenModel,
    condition: AnyCondition,
    settings: TokenSettings,
    draws: PairedDraws,
    edit: Edit | None = None,
) -> TokenRun:
    """Check the inputs and set up a generation, whose clock starts now.

    Raises:
        UserError: a condition or an edit that does not fit the model, or draws for another number of images.
    """
    device = model.net.compute_device
    prepared = prepare(model, condition, device)
    settings = resolve(settings, model)
    if len(draws) != len(condition):
        raise UserError(f"condition: it asks for {len(condition)} images, the draws are for {len(draws)}.")

    # What the report says of condition and edit, before the clock starts.
    conditions = condition.digests()
    edits: tuple[str, ...] = ()
    given = None
    if edit is not None:
        given = given_tokens(edit, model.grid, len(condition)).to(device)
        edits = edit_digests(given, given < 0)

    report, clock = new_report(name, model, settings, draws.seed, len(condition))
    report.conditions = conditions
    report.edits = edits
    return TokenRun(model.net, model.grid, prepared, settings, draws, report, clock, given)


def given_tokens(edit: Edit, grid: int, images: int) -> Tensor:
    """The tokens that an edit keeps, int64 [B, N + 1] as :class:`TokenRun` holds them.

    Raises:
        UserError: see :func:`tokens_again`.
    """
    codes = edit.start
    again = tokens_again(edit, grid, images, codes.device)
    return F.pad(torch.where(again, -1, codes.flatten(1)), (0, 1), value=-1)


def tokens_again(edit: Edit, grid: int, images: int, device: torch.device) -> Tensor:
    """The tokens to sample again, bool [B, N] on ``device``, of an edit that starts from codes or from their latents.

    Raises:
        UserError: see :meth:`Edit.token_mask`; a start of another grid.
    """
    height, width = edit.start.shape[-2:]
    if (height, width) != (grid, grid):
        raise UserError(
            f"latent_image: it has {height} x {width} tokens, and the model draws {grid} x {grid}; encode an image of "
            "the model's own size with VAE Encode and the vae of the same loader."
        )

    return edit.token_mask(grid, images, device)


def new_report(
    name: str, model: TokenModel | TarModel, settings: object, seed: int | None, images: int
) -> tuple[Report, Clock]:
    """Report and clock of a run that begins now."""
    device = model.net.compute_device
    report = Report(name, model.name, asdict(settings), seed, images, device.type)  # type: ignore[call-overload]
    stated = model.note if isinstance(model, TokenModel) else ""
    report.dtype = dtype_of(model.net)
    report.remark(stated, ops.remark(model.net, operations=model.net.operations))
    model.net.begin_run()
    return report, Clock(device)


# ------------------------------------------------------------ one pass


def prefill(run: TokenRun, null: bool, slots: int, image: Tensor | None = None) -> tuple[Tensor, Cache]:
    """Run the condition, alone or with the cells ``image`` int64 [B, m] behind it.

    Returns hidden rows [R, 1 + m, C], of which row i predicts cell i, and the cache with ``slots`` image slots.
    """
    net = run.net
    given = run.condition
    branches = 2 if null else 1

    rows = net.prefix(given.condition, given.lengths, guided=null)
    lengths = None if given.lengths is None else given.lengths.repeat(branches)
    x = None if image is None else net.tok_embeddings(image).repeat(branches, 1, 1)
    fed = rows.shape[1] + (0 if image is None else image.shape[1])
    run.report.add(transformer_passes=1, transformer_tokens=len(rows) * fed)
    hidden, cache = net.prefill(rows, run.grid, slots, lengths, x)

    # Images of one prompt share its prefill.
    if given.images is not None:
        hidden = hidden[given.images]
        cache.keep(given.images)
    run.report.add(cache_bytes=cache.bytes)
    return hidden, cache


def feed_tokens(
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
        position: int64 of the same shape.
        slot: int64 of the same shape, counted with the prefix.
        null: whether the rows of the null condition are fed too.
        end: slots below this one are attended to.
        mask: bool [m, end] or [B, m, end], True where a row attends to a slot; None: everywhere.
    """
    # 1. Embeddings, of transition tokens too.
    cells = fed.clamp(max=run.count) if run.net.config.special else fed
    tokens = run.tokens[:, cells] if fed.ndim == 1 else run.tokens.gather(1, cells)
    if run.span is not None:
        tokens = tokens + run.span[0]
    x = run.net.tok_embeddings(tokens)
    if run.net.config.special:
        number = fed - run.count - 1
        transition = run.net.spe_tok_embeddings["special_embeddings"](number.clamp(min=0))
        x = torch.where(number[..., None] >= 0, transition, x)

    # 2. The null condition's rows are fed the same tokens.
    if null:
        x = torch.cat([x, x])
        if position.ndim == 2:
            position = torch.cat([position, position])
            slot = torch.cat([slot, slot])
            mask = None if mask is None else torch.cat([mask, mask])
    run.report.add(transformer_passes=1, transformer_tokens=x.shape[0] * x.shape[1])
    return run.net.feed(x, position, slot, cache, end, mask, rows=run.rows)


def guidance_applies(settings: TokenSettings, step: int | Tensor) -> bool | Tensor:
    """Whether guidance is applied at a step, or at steps int64 [...], that are counted as ``cfg_interval`` counts.

    Of a tensor of steps the result is bool [...], or a bool that holds for all of them.
    """
    guided = guides(settings)
    if not guided or settings.cfg_interval is None:
        return guided
    return step <= settings.cfg_interval


def guided_logits(run: TokenRun, hidden: Tensor, guided: bool | Tensor) -> Tensor:
    """Logits fp32 [B, m, V] of hidden rows [R, m, C] after classifier-free guidance.

    ``guided``: whether it is applied, to all tokens or bool [m] or [B, m].
    """

    cells = hidden.shape[1]
    padded = F.pad(hidden, (0, 0, 0, run.rows - cells)) if run.rows else hidden
    logits = run.net.logits(padded, run.span)[:, :cells]
    images = len(run.tokens)
    mixed = cond = logits[:images]
    if guided is not False and len(logits) > images:
        null = logits[images:]
        assert run.settings.cfg is not None  # filled in from the model's defaults
        mixed = torch.lerp(null, cond, run.settings.cfg)
        if guided is not True:
            mixed = torch.where(guided[..., None], mixed, cond)

    # Before top-k and top-p, whose -inf is no fault. RMSNorm makes zeros of rows whose squares overflow: the logits are
    # then finite and wrong, and only the norm of the rows shows it.
    run.norms.append(torch.linalg.vector_norm(mixed, torch.inf))
    run.norms.append(torch.linalg.vector_norm(hidden.float()))
    return mixed


def decide(run: TokenRun, cells: Tensor, hidden: Tensor, guided: bool) -> None:
    """Draw the tokens of cells int64 [m] that the hidden rows [R, m, C] predict."""
    run.tokens.index_copy_(1, cells, sample(run, guided_logits(run, hidden, guided), cells))
    run.decided.index_fill_(1, cells, True)


def sample(run: TokenRun, logits: Tensor, cells: Tensor) -> Tensor:
    """Token values int64 [B, m] of cells int64 [m] or [B, m] from their logits fp32 [B, m, V]."""
    if run.penalty != 1:
        # Of the tokens before each cell, guesses among them.
        codes = run.tokens[:, None, :-1]
        before = (torch.arange(run.count, device=cells.device) < cells[..., None]).expand(len(codes), -1, -1)
        times = torch.zeros(logits.shape, dtype=torch.int32, device=cells.device)
        times.scatter_add_(2, codes.expand_as(before), before.to(times.dtype))
        logits = penalised(logits, times > 0, run.penalty)

    tokens = draw(logits, run.settings, run.draws.gumbel(run.stream, cells, logits.shape[-1]))
    if run.given is None:
        return tokens

    # A given token stands in its cell whatever is drawn for it.
    given = run.given[:, cells] if cells.ndim == 1 else run.given.gather(1, cells)
    return torch.where(given >= 0, given, tokens)


# ------------------------------------------------------------ settings of a model

# Published guidance and top-k by kind of condition: LlamaGen's for classes and text, Tar's for features, Janus' for
# prompts.
_PUBLISHED = {"class": (4.0, 2000), "text": (7.5, 1000), "features": (4.0, 0), "prompt": (5.0, 0)}
# PAR's guidance by width and regions (XL-4x, XXL-4x, 3B-4x, 3B-16x); all values can be drawn.
_PUBLISHED_PAR = {(1280, 4): 1.5, (1536, 4): 1.435, (3200, 4): 1.345, (3200, 16): 1.5}


def published(model: TokenModel) -> dict[str, Any]:
    """Published sampling settings of a model: "cfg" and "top_k"."""
    c = model.net.config
    found = published_for(c.condition, c.dim, c.regions)

    if not c.null:
        found["cfg"] = 1.0
    return found


def published_for(condition: str, width: int, regions: int) -> dict[str, Any]:
    """Published sampling settings, "cfg" and "top_k", by kind of condition, and of a PAR by width and regions."""
    cfg, top_k = _PUBLISHED[condition]

    par = _PUBLISHED_PAR.get((width, regions))
    if par is not None:
        cfg = par
        top_k = 0

    return {"cfg": cfg, "top_k": top_k}


def resolve(settings: S, model: TokenModel) -> S:
    """The settings with the model's published values for ``cfg`` and ``top_k`` where they are None.

    Raises:
        UserError: guidance of a model that was trained without a null class.
    """
    if settings.cfg is not None and settings.cfg > 1 and not model.net.config.null:
        raise UserError(f"cfg: {model.name} was trained without a null class, so guidance is impossible; choose cfg 1.")

    own = published(model)
    cfg = own["cfg"] if settings.cfg is None else settings.cfg
    top_k = own["top_k"] if settings.top_k is None else settings.top_k

    return replace(settings, cfg=cfg, top_k=top_k)


def raster_only(name: str, *models: TokenModel, janus: str = "") -> None:
    """Check that a sampler can decode models whose tokens are in raster order.

    Args:
        name: the sampler's title, for the message.
        models: the models.
        janus: why the sampler cannot decode a Janus, as the end of "NAME ..."; "" if it can.

    Raises:
        UserError: a model was trained in PAR's order, or is a Janus that the sampler cannot decode.
    """
    for model in models:
        if model.regions > 1:
            raise UserError(
                f"model: {model.name} was trained in PAR's order, which {name} does not follow; use the PAR Sampler."
            )
        if janus and isinstance(model, JanusModel):
            raise UserError(
                f"model: {model.name} is a Janus, and {name} {janus}; use the LlamaGen Sampler or the ZipAR Sampler."
            )
