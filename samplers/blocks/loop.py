"""BitDance's sampler: blocks of binary tokens one after another, each by diffusion.

Source: "BitDance" (arXiv 2602.14041) and its published code. Shapes: B images, L tokens of C bits in blocks of P, width
D, and R rows of the batch: those of the condition, then with guidance those of the null condition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ...errors import UserError, not_finite
from ...model_loaders.networks import ops
from ...model_loaders.networks.bitdance import BitDanceClass, BlockModel
from ...reports.record import GIVEN, PLAIN, Clock, Report, dtype_of
from ..conditioning import MaskedCondition, PromptCondition, expect_kind, expect_null_prompt
from ..driver import to_device
from ..editing import Edit, edit_digests
from ..mar.loop import Sampled, Sampler, Step
from ..mar.mar import annealed_steps
from ..noise import CounterRNG, PairedNoise, row_keys
from .diffusion import Denoiser, Known, Table, diffuse, table
from .memory import estimate
from .settings import BlockSettings
from .speculative import Paths, speculate

# Weights of the diffusion head above which a CPU is refused: the largest ImageNet model has less than half of it.
LARGE_HEAD = 1_000_000_000

T = TypeVar("T")


@dataclass(eq=False)
class BlockRun:
    """State of one generation, made by :func:`begin`."""

    model: BlockModel
    settings: BlockSettings
    noise: PairedNoise
    grid: tuple[int, int]  # height and width in tokens
    order: Tensor  # int64 [L]: cells of the tokens in their order, on the device
    inputs: tuple[Tensor, Tensor | None, Tensor]  # prefix rows, their lengths, and the first block of rows
    tokens: Tensor  # fp32 [R, L, C] in their order: -1 and +1, or 0 where undecided
    again: Tensor  # bool [B, L]: the tokens to draw, in their order
    report: Report
    clock: Clock

    def __post_init__(self) -> None:
        self.images = len(self.again)
        self.block = self.model.net.block
        self.guided = len(self.tokens) > self.images
        self.fixed_at = torch.full(self.again.shape, -1, dtype=torch.int32, device=self.again.device)
        self.finite = torch.ones((), dtype=torch.bool, device=self.again.device)

        # Blocks to draw, and those of which every token is drawn in every image. Of an edit, others are only read, or
        # drawn in part. The host reads this once.
        of_blocks = self.again.cpu().unflatten(1, (-1, self.block))
        self.drawn = [i for i, any_drawn in enumerate(of_blocks.any(2).any(0).tolist()) if any_drawn]
        self.whole = of_blocks.all(2).all(0).tolist()

    @property
    def blocks(self) -> int:
        """Blocks of an image."""
        return len(self.order) // self.block

    def cfg(self, block: int) -> float:
        """Guidance scale of a block; the linear one begins with 1 and ends just short of cfg, as published."""
        if self.settings.cfg_schedule == "linear":
            return 1 + (self.settings.cfg - 1) * block / self.blocks
        return self.settings.cfg

    def span(self, block: int) -> slice:
        """The tokens of a block."""
        return slice(block * self.block, (block + 1) * self.block)

    def known(self, block: int, rows: int) -> Known | None:
        """The given tokens of a block, for so many rows of the batch; None if there are none."""
        if self.whole[block]:
            return None

        again = self.again[:, self.span(block), None].repeat(rows // self.images, 1, 1)
        return Known(self.tokens[:rows, self.span(block)].clone(), again)

    def decide(self, block: int, prediction: Tensor) -> None:
        """Take the signs of a prediction [B or R, P, C] as the tokens of a block, in both branches."""
        self.finite &= prediction.isfinite().all()
        drawn = torch.where(prediction >= 0, 1.0, -1.0)
        known = self.known(block, len(drawn))
        if known is not None:
            drawn = torch.where(known.again, drawn, known.tokens)

        at = self.span(block)
        self.tokens[:, at] = drawn.repeat(len(self.tokens) // len(drawn), 1, 1)
        self.fixed_at[:, at] = torch.where(self.again[:, at], block, -1).to(torch.int32)

    def to_grid(self, values: Tensor) -> Tensor:
        """Values [B, L, ...] in the order of the tokens to the grid, [B, h, w, ...]."""
        out = torch.empty_like(values)
        out[:, self.order] = values
        return out.unflatten(1, self.grid)

    def latents(self) -> Tensor:
        """The tokens so far, fp32 [B, C, h, w]; 0 where undecided."""
        return self.to_grid(self.tokens[: self.images]).permute(0, 3, 1, 2).contiguous()

    def decided(self) -> Tensor:
        """The tokens that are decided, bool [B, h, w]."""
        return self.to_grid((self.fixed_at >= 0) | ~self.again)

    def finish(self) -> Sampled:
        """Stop the clock; returns the result.

        Raises:
            UserError: a prediction was not finite.
        """
        if not bool(self.finite):
            raise not_finite("model", self.model.name, "latents")

        outcome = torch.where(self.again, PLAIN, GIVEN).to(torch.uint8)
        for name, values in (("step", self.fixed_at), ("outcome", outcome)):
            self.report.maps[name] = self.to_grid(values).cpu().numpy()
        self.report.remark(self.model.net.remark)
        self.clock.stop(self.report)
        return Sampled(self.latents(), self.report)


def check(model: BlockModel, settings: BlockSettings) -> None:
    """Check settings against a model, before anything is loaded or computed.

    Raises:
        UserError: a size that the model does not draw.
    """
    model.grid(settings.height, settings.width, settings.any_size)


@torch.no_grad()
def bitdance(
    model: BlockModel,
    condition: MaskedCondition,
    settings: BlockSettings,
    noise: PairedNoise,
    edit: Edit | None = None,
) -> Sampler:
    """BitDance.

    Args:
        model: network and the metadata of its files.
        condition: what B images show, of the kind that the model reads.
        settings: see :class:`BlockSettings`.
        noise: noise of B images.
        edit: part of an image to draw again; None for a whole new one. A block is drawn without knowing later ones.

    Yields:
        :class:`Step` after every evaluation of the diffusion head, whose tokens are those of finished blocks; with
        speculation after every window of evaluations. Returns :class:`Sampled`.

    Raises:
        UserError: a condition that the model cannot read, a size that it does not draw, an edit that does not fit, a
            large model on a CPU, or predictions that are not finite.
    """
    run = begin(model, condition, settings, noise, edit)
    net = model.net
    places = net.places(run.grid)
    plan = Plan(run)
    before = 0  # evaluations of finished blocks

    # 1. Prefill the condition, and the first block of rows.
    with run.clock.phase("transformer"):
        prefix, lengths, first = run.inputs
        hidden, cache = net.begin(prefix, lengths, first, run.grid)
        run.report.add(transformer_passes=2, cache_bytes=cache.bytes)
        run.report.add(transformer_tokens=prefix.shape[0] * (prefix.shape[1] + first.shape[1]))
    fed = 0  # tokens in the cache

    for block in run.drawn:
        at = run.span(block)

        # 2. Feed the blocks since the last pass, both branches together.
        if at.start > fed:
            with run.clock.phase("transformer"):
                rows = net.embed(run.tokens[:, fed : at.start], places[fed : at.start])
                hidden = net.advance(rows, run.block + fed, cache)[:, -run.block :]
                run.report.add(transformer_passes=1, transformer_tokens=rows.shape[0] * rows.shape[1])
            fed = at.start

        # 3. Denoise the block.
        latents = run.latents()
        decided = run.decided()
        for count, made in timed(run.clock, "head", denoised(run, plan, block, hidden + places[at])):
            prediction = made
            done = before + count
            if done < plan.total:
                with run.clock.paused():
                    yield Step(done, plan.total, latents, decided, run.report)
        before += plan.counts[block] + 1

        # 4. The signs are the tokens.
        run.decide(block, prediction)

    with run.clock.paused():
        yield Step(plan.total, plan.total, run.latents(), run.decided(), run.report)

    return run.finish()


class Plan:
    """The diffusion steps of every block, with their tables, and the noise."""

    counts: list[int]  # diffusion steps of every block
    total: int  # evaluations of the head in the whole run
    start: Tensor  # noise of every token in its order, fp32 [B, L, C]
    noise: Tensor  # of the steps, fp32 [T, B, L, C]

    def __init__(self, run: BlockRun):
        settings = run.settings
        first = settings.diffusion_steps
        last = first if settings.diffusion_steps_end is None else settings.diffusion_steps_end
        self.counts = annealed_steps(first, last, settings.diffusion_steps_curve, run.blocks)
        self.total = sum(self.counts[block] + 1 for block in run.drawn)
        self.start, self.noise = draws(run)

        self._tables: dict[int, Table] = {}
        self._times: dict[int, Tensor] = {}
        for count in set(self.counts):
            made = table(count, run.model.time_shift)
            self._tables[count] = made
            self._times[count] = run.model.net.denoiser.times(to_device(torch.tensor(made.times), run.order.device))

    def table(self, block: int) -> Table:
        """The table of a block."""
        return self._tables[self.counts[block]]

    def times(self, block: int) -> Tensor:
        """The embeddings [N + 1, W] of its times."""
        return self._times[self.counts[block]]


def denoised(run: BlockRun, plan: Plan, block: int, conditions: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The evaluations so far and the predictions of a block, see :func:`.diffuse`; ``conditions``: fp32 [R, P, D].

    Where the scale of guidance is 1, both branches are independent images with noise of their own; so the published
    code draws the first block with linear guidance.
    """
    at = run.span(block)
    cfg = run.cfg(block)
    start = plan.start[:, at]
    noise = plan.noise[:, :, at]
    together = run.guided and cfg != 1
    apart = run.guided and not together
    if apart:
        start, noise = with_null_noise(run, start, noise)

    steps = plan.table(block)
    known = run.known(block, len(start))
    denoiser = Denoiser(run.model.net, conditions, plan.times(block))
    if run.settings.window > 1:
        paths = Paths(denoiser, steps, start, noise, acceptances(run, block, apart), cfg, 1 + together, known)
        yield from speculate(paths, run.settings.window, run.report)
    else:
        yield from enumerate(diffuse(denoiser, steps, start, noise, cfg, 1 + together, known), 1)

    run.report.add(head_calls=denoiser.calls, head_rows=denoiser.tokens)


def timed(clock: Clock, phase: str, steps: Iterator[T]) -> Iterator[T]:
    """The same steps, each timed as part of a phase."""
    while True:
        with clock.phase(phase):
            made = next(steps, None)
        if made is None:
            return

        yield made


def draws(run: BlockRun) -> tuple[Tensor, Tensor]:
    """Noise of every token in its order, on the device: start [B, L, C], and of the steps [T, B, L, C].

    It belongs to the cells of the grid, so that models of other blocks draw from the same noise.
    """
    channels = run.model.net.channels
    tokens = len(run.order)
    start = run.noise.first("full", tokens, channels)
    steps = run.noise.steps("full", run.settings.diffusion_steps, tokens, channels)
    device = run.order.device
    return to_device(start, device)[:, run.order], to_device(steps, device)[:, :, run.order].transpose(0, 1)


def with_null_noise(run: BlockRun, start: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """Noise of a block for both branches, each with its own: start [2 B, P, C] and steps [T, 2 B, P, C]."""
    null_start = run.noise.first("null", run.block, run.model.net.channels)
    null_steps = run.noise.steps("null", len(steps), run.block, run.model.net.channels)
    null_start = to_device(null_start, start.device)
    null_steps = to_device(null_steps, start.device).transpose(0, 1)
    return torch.cat([start, null_start]), torch.cat([steps, null_steps], 1)


def acceptances(run: BlockRun, block: int, apart: bool) -> CounterRNG:
    """Random numbers of a block for speculation, a row for every image; with ``apart`` also for the null branch."""
    keys = [row_keys(run.noise, "verify", run.blocks)[:, block]]
    if apart:
        keys.append(row_keys(run.noise, "null/verify", run.blocks)[:, block])

    return CounterRNG(to_device(torch.cat(keys), run.order.device))


# ------------------------------------------------------------------------------------------------ beginning


def begin(
    model: BlockModel,
    condition: MaskedCondition,
    settings: BlockSettings,
    noise: PairedNoise,
    edit: Edit | None,
) -> BlockRun:
    """Check the inputs and set up a generation, whose clock starts now.

    Raises:
        UserError: see :func:`bitdance`.
    """
    net = model.net
    device = net.compute_device
    expect_kind(condition, model.condition, model.name)
    grid = model.grid(settings.height, settings.width, settings.any_size)
    images = len(condition)
    if len(noise.images) != images:
        raise UserError(f"condition: it asks for {images} images, the noise was drawn for {len(noise.images)}.")
    expect_suited(model, device, settings)

    guided = settings.cfg != 1
    inputs = _inputs(model, condition, guided, grid)
    memory = estimate(model, condition, settings, edit is not None)
    report = Report("bitdance", model.name, asdict(settings), noise.seed, images, device.type, memory=memory)
    report.remark(model.note, ops.remark(net, operations=net.operations))
    net.begin_run()
    report.dtype = dtype_of(net)
    report.conditions = condition.digests()

    order = net.order(grid)
    tokens = torch.zeros(images * (1 + guided), len(order), net.channels, device=device)
    again = torch.ones(images, len(order), dtype=torch.bool, device=device)
    if edit is not None:
        given = given_tokens(model, edit, grid, device)
        cells = edit.token_mask(grid, images, device)
        report.edits = edit_digests(given, cells)

        again = cells[:, order]
        kept = given[:, order].expand(images, -1, -1)
        tokens = torch.where(again[..., None], 0.0, kept).repeat(1 + guided, 1, 1)

    clock = Clock(device)
    return BlockRun(model, settings, noise, grid, order, inputs, tokens, again, report, clock)


def _inputs(
    model: BlockModel, condition: MaskedCondition, guided: bool, grid: tuple[int, int]
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Prefix rows [R, n, D], their lengths int64 [R] or None, and the first block of rows [R, P, D]."""
    net = model.net
    if isinstance(net, BitDanceClass):
        classes = net.config.condition_size
        labels = condition.class_ids(classes, model.label_set, net.compute_device)  # type: ignore[union-attr]
        if guided:
            labels = torch.cat([labels, torch.full_like(labels, classes)])
        prefix, first = net.class_rows(labels)
        return prefix, None, first

    assert isinstance(condition, PromptCondition), "checked by expect_kind"
    if not condition.texts:
        raise UserError("condition: it holds no prompt; write at least one.")
    expect_null_prompt(condition, model.name)
    ids: Sequence[Sequence[int]] = [model.prompt(text) for text in condition.texts]
    if guided:
        ids = [*ids, *[model.null_prompt()] * len(ids)]
    return model.prompt_rows(ids, grid)


def given_tokens(model: BlockModel, edit: Edit, grid: tuple[int, int], device: torch.device) -> Tensor:
    """The tokens of the image that an edit starts from, fp32 [1 or B, L, C] in raster order.

    Raises:
        UserError: latents of another shape.
    """
    start = edit.start
    channels = model.net.channels
    if start.ndim != 4 or start.shape[1] != channels:
        raise UserError(
            f"latent_image: it has the shape {list(start.shape)}, {model.name} draws latents of {channels} channels; "
            "encode an image with VAE Encode and the vae of the same loader."
        )
    if tuple(start.shape[2:]) != grid:
        height, width = (side * model.stride for side in grid)
        own_height, own_width = (side * model.stride for side in start.shape[2:])
        remedy = f"encode an image of {width} x {height} with VAE Encode"
        with suppress(UserError):
            model.grid(own_height, own_width)  # raises for a size that it does not draw
            remedy = f"set width to {own_width} and height to {own_height}, or {remedy}"
        raise UserError(
            f"latent_image: it is of {own_width} x {own_height} pixels, and the image to draw of {width} x {height}; "
            f"{remedy}."
        )

    bits = torch.where(start.to(device, torch.float32) > 0, 1.0, -1.0)
    return bits.flatten(2).transpose(1, 2)


def expect_edit(model: BlockModel, edit: Edit, settings: BlockSettings, images: int) -> None:
    """Check an edit of some images before anything is loaded; raises as :func:`begin`."""
    grid = model.grid(settings.height, settings.width, settings.any_size)
    device = edit.start.device
    given_tokens(model, edit, grid, device)
    edit.token_mask(grid, images, device)


def expect_suited(model: BlockModel, device: torch.device, settings: BlockSettings) -> None:
    """Raise a UserError if a model is too large for a CPU."""
    weights = sum(weight.numel() for weight in model.net.denoiser.parameters())
    if device.type != "cpu" or weights < LARGE_HEAD:
        return

    height, width = model.grid(settings.height, settings.width, settings.any_size)
    rows = height * width * (1 + (settings.cfg != 1))
    work = 2 * weights * rows * (settings.diffusion_steps + 1)
    raise UserError(
        f"model: {model.name} needs about {work / 1e15:.1f} PFLOP an image for its diffusion head alone; choose a "
        "BitDance-ImageNet model on a CPU, or a GPU."
    )
