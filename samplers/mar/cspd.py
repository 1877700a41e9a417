"""CSpD: a small MAR drafts tokens, a large one (the target) verifies them.

Source: Wang et al. 2024, "Continuous Speculative Decoding for Autoregressive Image Generation" (arXiv 2411.11925), and its
published code. Equation numbers below are the paper's; p is the target, q the draft. Three modes:

``lossless``. The target's distribution, exactly, whatever the draft. The draft model drafts some AR steps; the target's z of
each of them is computed given the drafts before it, in one pass; the target's head is evaluated at all states of the drafted
diffusion paths in one batch; a path is kept up to its first rejected diffusion step, that step is put right by a coupling of
the two Gaussians (``coupling.py``) and the rest of the path is the target's own. Step by step the coupling's output is a
sample of the target's kernel at a state that the target has reached, so every token is a sample of the target's, given the
tokens before it. A token counts as accepted if it is the draft's to the end. Behind the first AR step in which one is not,
the target's z was computed from tokens that are not there: all later drafts are discarded. The tokens that come out depend
on neither the draft length nor the batch. What is gained does: two different models hardly ever agree on a whole path,
because the last diffusion steps are almost without noise.

``paper``. The criterion as the paper derives it; approximate. A token is accepted with probability min(1, ratio), where

    ratio = Sigma p(x_0 | x_1) / q(x_0 | x_1),    Sigma = product over t >= 2 of sigma_q,t / sigma_p,t         (4), (5)

with both models' kernels at the states of one trajectory, the draft's. The exponents of the steps t >= 2 are left out as in
(14) to (20), on the ground that the models share their noise; on one trajectory they do not cancel, which is why this is
approximate. Without alignment they stay in, and next to nothing is accepted. A rejected token is drawn anew as in (7) to
(11): from the last kernel of the target's own trajectory, a draw being kept with probability max(0, 1 - 1 / ratio), both
models' kernels again on that one trajectory. Prefix rule as in ``lossless``.

``published``. The published code's rule; approximate: each model on its own trajectory; Sigma upside down; the last step's
deviations times 42 where a token is judged, but not where it is drawn anew; drafts judged given the tokens of the last
verification, and all kept whatever happened to those before; the guidance of the segment's last AR step; at most 100 draws
for a rejected token, and zero if none is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...errors import UserError
from ...model_loaders.networks.mar import MARModel, pick
from ...reports.record import ACCEPTED, DRAFTED, PLAIN, REJECTED, Report
from ..conditioning import Condition
from ..noise import Dice, Noise, row_keys
from .coupling import Gaussian
from .denoiser import Denoiser, RowNoise
from .diffusion import Tables
from .editing import Edit
from .loop import Conditions, Decide, Run, Sampler, Transformer, begin, loop
from .mar import PlainHead
from .settings import CSpDSettings
from .speculative import Drafts, SpeculativeDenoiser
from .transformer import FullTransformer

# The published code's.
INNER_TEMPERATURE = 42.0
# Draws for a rejected token. Then published takes zero, as its code does, and paper the last draw.
TRIES = 100
# Lanes of a token's dice, beyond those of its diffusion steps (speculative.py).
_GUESS, _NORMAL, _UNIFORM = range(1 << 20, (1 << 20) + 3)


# ------------------------------------------------------------------------------------------------ randomness


class Rolls(Protocol):
    """Where the approximate modes' judgements come from; a test injects recorded ones."""

    def guess(self, image: Tensor, position: Tensor) -> Tensor:
        """Uniform fp32 [N] that a draft's ratio is compared with, for rows int64 [N] each."""
        ...

    def again(self, image: Tensor, position: Tensor, attempt: int, channels: int) -> tuple[Tensor, Tensor]:
        """Standard normals fp32 [N, channels] of a draw for rejected rows, and the uniforms fp32 [N] it is judged by."""
        ...


class PairedRolls:
    """Rolls from every token's own dice.

    Args:
        keys: int64 [B, L].
    """

    def __init__(self, keys: Tensor):
        self.keys = keys

    def guess(self, image: Tensor, position: Tensor) -> Tensor:
        return Dice(self.keys[image, position]).uniform(_GUESS)[:, 0]

    def again(self, image: Tensor, position: Tensor, attempt: int, channels: int) -> tuple[Tensor, Tensor]:
        dice = Dice(self.keys[image, position])
        return dice.normal(_NORMAL, attempt, 1, channels)[:, 0], dice.uniform(_UNIFORM, attempt)[:, 0]


# ------------------------------------------------------------------------------------------------ traced diffusion


class Trace(NamedTuple):
    """The diffusion paths of N rows.

    Attributes:
        path: states fp32 [N, S + 1, channels], start noise first, token last.
        kernel: what each step drew from, fp32 [N, S, channels]; deviations as the model learned them, without the
            temperature, the last step's too.
    """

    path: Tensor
    kernel: Gaussian


class TracedDenoiser(Denoiser):
    """A denoiser that hands out the whole path."""

    def __init__(self, run: Run, table: Tables):
        super().__init__(run, table)
        self._steps: list[tuple[Tensor, Tensor, Tensor]] = []

    def advance(
        self,
        k: int,
        x: Tensor,
        eps: Tensor,
        logits: Tensor,
        noise: Tensor,
        draft: Tensor | None,
        pull: tuple[float, ...],
        space: str,
    ) -> Tensor:
        i = len(self.table) - 1 - k
        mean = self.table.posterior_mean(i, x, self.table.predict_x0(i, x, eps))
        self._steps.append((x, mean, 0.5 * self.table.log_variance(i, logits)))
        return super().advance(k, x, eps, logits, noise, draft, pull, space)

    def trace(self, z: Conditions, scale: Tensor, first: Tensor, noise: Tensor) -> Trace:
        """Denoise N rows; arguments as :meth:`Denoiser.__call__`."""
        self._steps = []
        out = self(z, scale, first, noise)
        states, means, log_stds = zip(*self._steps, strict=True)
        self._steps = []
        return Trace(torch.stack([*states, out], 1), Gaussian(torch.stack(means, 1), torch.stack(log_stds, 1)))


# ------------------------------------------------------------------------------------------------ criteria


def _exponent(x: Tensor, kernel: Gaussian, widen: float = 1.0) -> Tensor:
    """-1/2 sum over channels of ((x - mean) / (widen std))^2."""
    return -0.5 * (((x - kernel.mean) * torch.exp(-kernel.log_std) / widen) ** 2).sum(-1)


def paper_ratio(path: Tensor, q: Gaussian, p: Gaussian, inner: float = 1.0, exponents: float = 0.0) -> Tensor:
    """log of Sigma p(x_0 | x_1) / q(x_0 | x_1) on one trajectory: equations (4), (5).

    Args:
        path: states fp32 [N, S + 1, channels] of either model.
        q, p: both models' kernels at these states, fp32 [N, S, channels].
        inner: the last step's deviations are multiplied by it.
        exponents: temperature at which the other steps' exponents are counted, as without shared noise; 0 leaves them out.

    Returns:
        fp32 [N].
    """
    last_q, last_p = (Gaussian(g.mean[:, -1], g.log_std[:, -1]) for g in (q, p))
    out = (q.log_std - p.log_std).sum((1, 2))
    out = out + _exponent(path[:, -1], last_p, inner) - _exponent(path[:, -1], last_q, inner)
    if exponents:
        after, rest_q, rest_p = path[:, 1:-1], *(Gaussian(g.mean[:, :-1], g.log_std[:, :-1]) for g in (q, p))
        out = out + (_exponent(after, rest_p, exponents) - _exponent(after, rest_q, exponents)).sum(1)
    return out


class LastStep(NamedTuple):
    """Of a diffusion path what the published code keeps.

    Attributes:
        kernel: the last step's, fp32 [N, channels].
        rest: log deviations of all other steps, summed, fp32 [N, channels].
    """

    kernel: Gaussian
    rest: Tensor


def last_step(trace: Trace) -> LastStep:
    """What the published code keeps of a path."""
    mean, log_std = trace.kernel
    return LastStep(Gaussian(mean[:, -1], log_std[:, -1]), log_std[:, :-1].sum(1))


def published_ratio(token: Tensor, q: LastStep, p: LastStep, inner: float = INNER_TEMPERATURE) -> Tensor:
    """log of the published code's acceptance ratio, fp32 [N], of draft tokens [N, channels]; Sigma is upside down there."""
    widths = (p.rest - q.rest + q.kernel.log_std - p.kernel.log_std).sum(-1)
    return widths + _exponent(token, p.kernel, inner) - _exponent(token, q.kernel, inner)


def published_keep(token: Tensor, q: LastStep, p: LastStep) -> Tensor:
    """Probability fp32 [N] that the published code keeps a draw [N, channels] for a rejected token: max(0, p - q / Sigma) / p."""
    return (1 - torch.exp(-published_ratio(token, q, p, 1.0))).clamp(min=0)


# ------------------------------------------------------------------------------------------------ the samplers


class Drafted(NamedTuple):
    """An AR step's drafts: the draft model's z of it [B, n, C], and the paths of its B n tokens, image by image."""

    z: Conditions
    trace: Trace


def rows_at(where: Tensor) -> tuple[Tensor, Tensor]:
    """Image and position, int64 [B n] each, of positions [B, n]."""
    image = torch.arange(len(where), device=where.device)[:, None].expand_as(where)
    return image.flatten(), where.flatten()


def _flat(z: Conditions) -> Conditions:
    """[B, n, C] to [B n, C]."""
    return Conditions(z.cond.flatten(0, 1), None if z.null is None else z.null.flatten(0, 1))


def _join(parts: Sequence[Conditions]) -> Conditions:
    """Rows [N, C] behind one another."""
    nulls = [part.null for part in parts if part.null is not None]
    return Conditions(torch.cat([part.cond for part in parts]), torch.cat(nulls) if nulls else None)


def _some(z: Conditions, rows: Tensor) -> Conditions:
    return Conditions(z.cond[rows], None if z.null is None else z.null[rows])


class _Both:
    """What all modes share: two models on one canvas, the pre-fill, the record."""

    def __init__(
        self, run: Run, draft: MARModel, transformer: Transformer, draft_transformer: Transformer, rolls: Rolls | None
    ):
        assert isinstance(run.settings, CSpDSettings)
        self.settings = s = run.settings
        self.transformer, self.draft_transformer = transformer, draft_transformer
        self.alone = PlainHead(run, transformer)
        self.noise = self.alone.noise
        self.own_noise = self.noise if s.alignment else RowNoise(run, "target", run.tables)
        # The draft works on the same canvas, with the target's diffusion steps; what it costs is counted apart.
        scratch = Report("draft", draft.name, {}, None, run.report.images, run.report.device)
        self.draft_run = replace(run, model=draft, report=scratch)
        self.draft_head, self.head = TracedDenoiser(self.draft_run, run.tables), TracedDenoiser(run, run.tables)
        self.keys = row_keys(run.noise, "verify", run.tokens.shape[1]).to(run.tokens.device)
        self.rolls = rolls or PairedRolls(self.keys)
        self.prefill = int(run.plan.steps * s.prefill_ratio) + 1  # the reference's s <= S ratio
        self.outcome = torch.full(run.tokens.shape[:2], PLAIN, dtype=torch.uint8, device=run.tokens.device)

    def __call__(self, run: Run, step: int) -> Tensor:
        if step < self.prefill:
            with run.clock.phase("transformer"):
                z = self.transformer(run, step, run.plan.ahead(step))
            with run.clock.phase("head"):
                return self.alone(run, step, z)
        new = self.decide(run, step)
        drafts = self.draft_run.report.counts
        both = {
            name: drafts.get(name, 0)
            for name in ("transformer_passes", "transformer_tokens", "head_calls", "head_rows")
        }
        run.report.add(**both, draft_passes=both["transformer_passes"], draft_head_calls=both["head_calls"])
        drafts.clear()
        if step + 1 == run.plan.steps:
            grid = run.model.net.config.grid
            run.report.maps["outcome"] = self.outcome.view(-1, grid, grid).cpu().numpy()
        return new

    def decide(self, run: Run, step: int) -> Tensor:
        """Tokens [B, n, channels] of an AR step after the pre-fill."""
        raise NotImplementedError

    def write(self, run: Run, where: Tensor, tokens: Tensor) -> None:
        """Put tokens [B, n, channels] on the canvas at positions [B, n]."""
        run.tokens = run.tokens.scatter(1, where[..., None].expand(-1, -1, tokens.shape[2]), tokens)

    def draft(self, run: Run, step: int) -> Drafted:
        """The draft model's tokens of an AR step, given what is on the canvas; written there too."""
        with run.clock.phase("draft"):
            where = run.plan.ahead(step)
            self.draft_run.tokens = run.tokens
            z = self.draft_transformer(self.draft_run, step, where)
            trace = self.draft_head.trace(_flat(z), self.scale(run, step, where.numel()), *self.noise(*rows_at(where)))
            self.write(run, where, trace.path[:, -1].view(*where.shape, -1))
            return Drafted(z, trace)

    @staticmethod
    def scale(run: Run, step: int, rows: int) -> Tensor:
        """An AR step's guidance scale for as many rows, fp32 [rows, 1]."""
        return torch.full((rows, 1), run.plan.cfg[step], device=run.tokens.device)

    def record(self, run: Run, where: Tensor, ok: Tensor) -> None:
        """Note which drafts at positions [B, n] were accepted, bool [B, n]."""
        self.outcome.scatter_(1, where, torch.where(ok, ACCEPTED, REJECTED).to(torch.uint8))
        accepted = int(ok.sum())
        run.report.add(accepted=accepted, rejected=ok.numel() - accepted, restarts=int((~ok).any(1).sum()))


class Published(_Both):
    """Mode ``published``: draft AR steps one by one, judge them a segment at a time, rewrite the rejected."""

    def __init__(
        self, run: Run, draft: MARModel, transformer: Transformer, draft_transformer: Transformer, rolls: Rolls | None
    ):
        super().__init__(run, draft, transformer, draft_transformer, rolls)
        self.inner = self.settings.inner_temperature or INNER_TEMPERATURE
        self.first = self.prefill  # first AR step that is not verified yet
        self.kept = [torch.zeros_like(run.tokens) for _ in range(3)]  # the drafts' last steps

    def decide(self, run: Run, step: int) -> Tensor:
        where = run.plan.ahead(step)
        (mean, log_std), rest = last_step(self.draft(run, step).trace)
        for all_of_it, new in zip(self.kept, (mean, log_std, rest), strict=True):
            all_of_it.scatter_(1, where[..., None].expand(-1, -1, new.shape[1]), new.view(*where.shape, -1))
        self.outcome.scatter_(1, where, DRAFTED)
        if step % self.settings.draft_length == 0 or step + 1 == run.plan.steps:
            self.verify(run, step)
        return pick(run.tokens, where)

    def verify(self, run: Run, step: int) -> None:
        """Judge all drafts since the last verification."""
        where = run.plan.ahead(self.first, step + 1 - self.first)
        with run.clock.phase("transformer"):
            z = self.transformer(run, self.first, where)
        self.first = step + 1
        with run.clock.phase("head"):
            rows = rows_at(where)
            p = last_step(self.head.trace(_flat(z), self.scale(run, step, where.numel()), *self.own_noise(*rows)))
            mean, log_std, rest = (pick(x, where).flatten(0, 1) for x in self.kept)
            q, tokens = LastStep(Gaussian(mean, log_std), rest), pick(run.tokens, where).flatten(0, 1)
            ok = published_ratio(tokens, q, p, self.inner) > self.rolls.guess(*rows).log()
            tokens = torch.where(ok[:, None], tokens, 0)
            todo = (~ok).nonzero()[:, 0]
            for attempt in range(TRIES):
                if not len(todo):
                    break
                normals, uniforms = self.rolls.again(rows[0][todo], rows[1][todo], attempt, tokens.shape[1])
                mine, theirs = (
                    LastStep(Gaussian(g.kernel.mean[todo], g.kernel.log_std[todo]), g.rest[todo]) for g in (q, p)
                )
                drawn = theirs.kernel.mean + theirs.kernel.log_std.exp() * normals
                hit = published_keep(drawn, mine, theirs) > uniforms
                tokens[todo[hit]] = drawn[hit]
                todo = todo[~hit]
        self.write(run, where, tokens.view(*where.shape, -1))
        self.record(run, where, ok.view(where.shape))
        if not bool(ok.all()):
            self.draft_transformer.forget()


class Segments(_Both):
    """Modes ``paper`` and ``lossless``: draft a segment of AR steps, keep the prefix that the target agrees with.

    A batch goes on with its slowest image. What the others had accepted beyond is drafted again from the same noise and
    judged by the same dice, so that their tokens do not depend on it.
    """

    def __init__(
        self, run: Run, draft: MARModel, transformer: Transformer, draft_transformer: Transformer, rolls: Rolls | None
    ):
        super().__init__(run, draft, transformer, draft_transformer, rolls)
        s, table = self.settings, run.tables
        self.inner = s.inner_temperature or 1.0
        # Twice what was kept last time, as assisted generation does: no long drafts that are always discarded.
        self.length = s.draft_length
        self.ready: dict[int, Tensor] = {}  # tokens of AR steps that are decided and not yet asked for
        self.real = SpeculativeDenoiser(run, table, s.speculation)
        self.of_draft = SpeculativeDenoiser(self.draft_run, table, 0)

    def decide(self, run: Run, step: int) -> Tensor:
        if step not in self.ready:
            self.segment(run, step)
        return self.ready.pop(step)

    def segment(self, run: Run, step: int) -> None:
        """Draft from AR step ``step`` on and verify; at least that step is decided."""
        steps = range(step, min(step + self.length, run.plan.steps))
        drafted = [self.draft(run, s) for s in steps]
        where = run.plan.ahead(step, len(steps))
        shown = (
            torch.zeros(run.tokens.shape[:2], dtype=torch.bool, device=where.device)
            if run.drafted is None
            else run.drafted
        )
        run.drafted = shown.scatter(1, where, True)
        # A transformer that remembers must see final tokens only, so it is asked step by step, as far as drafts hold.
        together = getattr(self.transformer, "several", None) if len(steps) > 1 else None
        groups = [list(steps)] if together else [[s] for s in steps]
        kept = 0
        for group in groups:
            with run.clock.phase("transformer"):
                zs = (
                    together(run, step, len(group))
                    if together
                    else [self.transformer(run, group[0], run.plan.ahead(group[0]))]
                )
            judge = self.lossless if self.settings.mode == "lossless" else self.paper
            with run.clock.phase("head"):
                for s, (tokens, ok) in zip(
                    group, judge(run, group, [drafted[s - step] for s in group], zs), strict=False
                ):
                    self.ready[s] = tokens
                    self.write(run, run.plan.ahead(s), tokens)
                    self.record(run, run.plan.ahead(s), ok)
                    if not bool(ok.all()):
                        self.length = min(self.settings.draft_length, max(1, 2 * kept))
                        self.draft_transformer.forget()
                        return
                    kept += 1
        self.length = min(self.settings.draft_length, 2 * kept)

    def rows(self, run: Run, steps: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Image, position and guidance scale of all rows of some AR steps, and which rows are whose."""
        places = [rows_at(run.plan.ahead(s)) for s in steps]
        image, position = (torch.cat(x) for x in zip(*places, strict=True))
        scale = torch.cat([self.scale(run, s, len(place[0])) for s, place in zip(steps, places, strict=True)])
        blocks = torch.arange(len(image), device=image.device).split([len(place[0]) for place in places])
        return image, position, scale, list(blocks)

    def lossless(
        self, run: Run, steps: Sequence[int], drafted: Sequence[Drafted], zs: Sequence[Conditions]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Tokens [B, n, channels] of AR steps in turn, and which are the draft's, bool [B, n]."""
        image, position, scale, blocks = self.rows(run, steps)
        start, count, temperature = self.noise(image, position), len(run.tables), run.settings.temperature
        rows = self.real.rows(_join([_flat(z) for z in zs]), scale, *start, Dice(self.keys[image, position]))
        path = torch.cat([d.trace.path for d in drafted])
        mean, log_std = (torch.cat(x) for x in zip(*(d.trace.kernel for d in drafted), strict=True))
        log_std = log_std + (math.log(temperature) if temperature else -math.inf)
        log_std[:, -1] = -math.inf
        width = torch.full((len(path),), count, device=path.device)
        done = self.real.verify(
            rows, torch.arange(len(path), device=path.device), Drafts(path, Gaussian(mean, log_std), width)
        )
        run.report.add(drafted_steps=len(path) * count)
        for block in blocks:
            shape = len(run.tokens), len(block) // len(run.tokens)
            run.report.add(accepted_steps=int(done[block].sum()))
            yield self.real.finish(rows, block).view(*shape, -1), (done[block] == count).view(shape)

    def paper(
        self, run: Run, steps: Sequence[int], drafted: Sequence[Drafted], zs: Sequence[Conditions]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The same, judged by the paper's ratio."""
        image, position, scale, blocks = self.rows(run, steps)
        path = torch.cat([d.trace.path for d in drafted])
        q = Gaussian(*(torch.cat(x) for x in zip(*(d.trace.kernel for d in drafted), strict=True)))
        z_p, z_q = _join([_flat(z) for z in zs]), _join([_flat(d.z) for d in drafted])
        ratio = self.ratio(path, q, self.kernels(self.real, z_p, scale, path))
        ok = self.rolls.guess(image, position).log() <= ratio
        for block in blocks:
            shape, tokens = (len(run.tokens), len(block) // len(run.tokens)), path[block, -1]
            bad = block[~ok[block]]
            if len(bad):
                tokens[~ok[block]] = self.anew(_some(z_p, bad), _some(z_q, bad), scale[bad], image[bad], position[bad])
            yield tokens.view(*shape, -1), ok[block].view(shape)

    def ratio(self, path: Tensor, q: Gaussian, p: Gaussian) -> Tensor:
        """log ratio fp32 [N]; without alignment nothing cancels (at temperature 0 there is nothing that could)."""
        return paper_ratio(path, q, p, self.inner, 0.0 if self.settings.alignment else self.settings.temperature)

    @staticmethod
    def kernels(head: SpeculativeDenoiser, z: Conditions, scale: Tensor, path: Tensor) -> Gaussian:
        """A model's kernels fp32 [N, S, channels] at the states of paths [N, S + 1, channels], in one call of its head."""
        n, count, channels = len(path), len(head.table), path.shape[2]
        row = torch.arange(n, device=path.device).repeat_interleave(count)
        step = torch.arange(count, device=path.device).repeat(n)
        x = path[:, :-1].flatten(0, 1)
        rows = head.rows(z, scale, path[:, 0], x.new_zeros(0), Dice(row[:0]))  # only looked at: no noise, no dice
        mean, log_std = head.learned(step, x, *head.predict(rows, row, step, x))
        return Gaussian(mean.view(n, count, channels), log_std.view(n, count, channels))

    def anew(self, z: Conditions, z_draft: Conditions, scale: Tensor, image: Tensor, position: Tensor) -> Tensor:
        """Tokens fp32 [N, channels] in place of N rejected ones, from max(0, p - q) / Z: equations (7) to (11)."""
        path, p = self.head.trace(z, scale, *self.own_noise(image, position))
        q = self.kernels(self.of_draft, z_draft, scale, path)
        out, todo = path[:, -1].clone(), torch.arange(len(path), device=path.device)
        for attempt in range(TRIES):
            if not len(todo):
                break
            normals, uniforms = self.rolls.again(image[todo], position[todo], attempt, out.shape[1])
            mine, theirs = (Gaussian(g.mean[todo], g.log_std[todo]) for g in (q, p))
            drawn = theirs.mean[:, -1] + theirs.log_std[:, -1].exp() * normals
            out[todo] = drawn
            ratio = self.ratio(torch.cat([path[todo, :-1], drawn[:, None]], 1), mine, theirs)
            todo = todo[uniforms > 1 - torch.exp(-ratio)]
        return out


def _check(draft: MARModel, target: MARModel) -> None:
    """Whether one model can draft for the other.

    Raises:
        UserError: other tokens, another grid, other classes, another device.
    """
    d, t = draft.net.config, target.net.config
    pairs = (
        ("numbers a token", d.channels, t.channels),
        ("latent scale", draft.latent_scale, target.latent_scale),
        ("patch", draft.patch, target.patch),
        ("tokens", d.tokens, t.tokens),
        ("classes", d.classes, t.classes),
        ("label set", draft.label_set or target.label_set, target.label_set or draft.label_set),
        ("device", next(draft.net.parameters()).device, next(target.net.parameters()).device),
    )
    for what, theirs, ours in pairs:
        if theirs != ours:
            raise UserError(
                f"draft: {draft.name} and the target {target.name} differ in {what}, {theirs} and {ours}; "
                "take a draft that was trained on the target's tokens and classes."
            )


def cspd(
    model: MARModel,
    condition: Condition,
    settings: CSpDSettings,
    noise: Noise,
    seed: int | None = None,
    transformer: Transformer | None = None,
    edit: Edit | None = None,
    *,
    draft: MARModel,
    draft_transformer: Transformer | None = None,
    rolls: Rolls | None = None,
) -> Sampler:
    """CSpD with ``model`` as target.

    Args:
        model, condition, noise, seed: as :func:`samplers.mar.mar`.
        settings: see :class:`CSpDSettings`.
        transformer: how the target's networks are run; None for in full. Asked at verifications only (and in the pre-fill).
        edit: part of a picture to be drawn anew; None for a whole new one.
        draft: the model that drafts.
        draft_transformer: how the draft's networks are run; None for in full.
        rolls: the approximate modes' dice; None for the noise's own.

    Yields:
        :class:`Step` after every AR step, drafts shown; returns :class:`Sampled`. Passes and head calls in the report are
        both models' together; ``draft_passes`` and ``draft_head_calls`` say how many of them were the draft's.

    Raises:
        UserError: what :func:`samplers.mar.mar` raises; a draft of other tokens, grid, classes or on another device.
    """
    _check(draft, model)
    run = begin("cspd", model, condition, settings, noise, seed, edit)
    run.report.model = f"{model.name}, drafted by {draft.name}"
    kind = Published if settings.mode == "published" else Segments
    with torch.no_grad():
        decide: Decide = kind(
            run, draft, transformer or FullTransformer(), draft_transformer or FullTransformer(), rolls
        )
    return (yield from loop(run, decide))
