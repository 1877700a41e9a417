"""What CSpD's modes share: two models on one canvas, traced diffusion, prefill and drafting (see ``cspd.py``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from ...model_loaders.networks.mar import MARModel
from ...model_loaders.networks.rows import Rows
from ...reports.record import ACCEPTED, PLAIN, PROMPT_COUNTS, REJECTED, Report
from ..noise import CounterRNG, copied, row_keys
from .coupling import Gaussian
from .denoiser import Denoiser, RowNoise
from .diffusion import Ancestral, Tables
from .head import rows_at
from .loop import Conditions, HeadRows, Run, Transformer
from .settings import CSpDSettings
from .speculative import SpeculativeDenoiser, SpeculativeHead

# Counts of the report that are both models' together.
_BOTH = ("transformer_passes", "transformer_tokens", "head_calls", "head_rows")
# Redraws of a rejected token. Then published takes zero, as its code does, and paper the last draw.
TRIES = 100
# Lanes of a token's random numbers, after those of its diffusion steps (speculative.py).
_GUESS, _NORMAL, _UNIFORM = range(1 << 20, (1 << 20) + 3)


class RejectionDraws(Protocol):
    """Random numbers of the approximate modes' acceptance tests and redraws; a test injects recorded ones."""

    def guess(self, image: Tensor, position: Tensor) -> Tensor:
        """Uniform fp32 [N] to compare a draft's ratio with, for rows int64 [N] each."""
        ...

    def again(self, image: Tensor, position: Tensor, first: int, count: int, channels: int) -> tuple[Tensor, Tensor]:
        """Redraws ``first ..`` of rows: standard normals fp32 [N, count, channels], and uniforms fp32 [N, count] for their acceptance."""
        ...


class PairedRejectionDraws:
    """Rejection draws from the random numbers of each token.

    Args:
        keys: int64 [B, L].
    """

    def __init__(self, keys: Tensor):
        self.keys = keys

    def guess(self, image: Tensor, position: Tensor) -> Tensor:
        return CounterRNG(self.keys[image, position]).uniform(_GUESS)[:, 0]

    def again(self, image: Tensor, position: Tensor, first: int, count: int, channels: int) -> tuple[Tensor, Tensor]:
        rng = CounterRNG(self.keys[image, position])
        return rng.normal(_NORMAL, first, count, channels), rng.uniform(_UNIFORM, first, count)


# Redraws of a row and channels that are computed at once.
_BLOCK = 10


def redrawn(
    draws: RejectionDraws,
    image: Tensor,
    position: Tensor,
    of: Gaussian,
    keep: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """For each of N rows the first of :data:`TRIES` draws of a Gaussian that is kept.

    On a GPU all draws are made, so that the host does not wait for it.

    Args:
        draws: random numbers.
        image, position: int64 [N].
        of: mean and log std, fp32 [N, channels].
        keep: from draws [N, count, channels] and uniforms [N, count] to which draws are kept, bool [N, count].

    Returns:
        The draws [N, channels] that were kept, whether there is one, bool [N], and the last draws [N, channels].
    """
    mean, std = of.mean[:, None], of.log_std.exp()[:, None]
    out, last, found = torch.zeros_like(of.mean), of.mean, torch.zeros_like(image, dtype=torch.bool)
    for first in range(0, TRIES, _BLOCK):
        normals, uniforms = draws.again(image, position, first, _BLOCK, of.mean.shape[1])
        drawn = mean + std * normals
        hit = keep(drawn, uniforms)
        index = hit.to(torch.uint8).argmax(1)[:, None, None].expand(-1, 1, drawn.shape[2])
        new = hit.any(1) & ~found
        out, last = torch.where(new[:, None], drawn.gather(1, index)[:, 0], out), drawn[:, -1]
        found = found | new
        if image.device.type == "cpu" and bool(found.all()):
            break
    return out, found, last


class Trace(NamedTuple):
    """The diffusion paths of N rows.

    Attributes:
        path: states fp32 [N, S + 1, channels], start noise first, token last.
        kernel: the learned kernel of each step, fp32 [N, S, channels], the last one's too; stds without the temperature.
    """

    path: Tensor
    kernel: Gaussian


class _Traced(Ancestral):
    """The ancestral step, recording states and head outputs, from which all kernels are computed after the loop."""

    collects = 3

    def __init__(self, rule: Ancestral, table: Tables):
        self.take(rule)
        self.mix: Tensor | None = None
        self._states: list[Tensor] = []  # before every step, [N, channels] each
        self._outputs: list[Tensor] = []  # [N, P, 2 channels] each
        low, high = table.posterior_log_variance_clipped, table.betas.log()
        columns = [*zip(*map(self.linear, range(len(table))), strict=True), ((low + high) / 4).flip(0).tolist()]
        numbers = torch.tensor([*columns, [c[4] for c in self.coefficients]])
        # [4, S, 1]: coefficients of x and of eps, log std at logits 0, slope of the log std.
        self._kernel = copied(numbers, self.std.device)[..., None]

    def fresh(self, draft: Tensor | None) -> _Traced:
        out = cast(_Traced, super().fresh(draft))
        out._states, out._outputs = [], []
        return out

    def collected(self) -> tuple[Tensor, ...]:
        """States before every step, and the kernels' means and log stds, [N, S, channels] each."""
        assert self.mix is not None
        states, outputs = torch.stack(self._states, 1), torch.stack(self._outputs, 1)
        channels, (of_x, of_eps, middle, slope) = states.shape[2], self._kernel
        eps = (self.mix[:, None, :1] @ outputs[..., :channels])[:, :, 0]
        return states, of_x * states - of_eps * eps, middle + slope * outputs[:, :, 0, channels:]

    def branches(self, k: int, x: Tensor, out: Tensor, mix: Tensor, noise: Tensor) -> Tensor:
        self.mix = mix
        self._states.append(x[:, 0])
        self._outputs.append(out)
        return super().branches(k, x, out, mix, noise)


class TracedDenoiser(Denoiser):
    """A denoiser that returns the whole diffusion path."""

    def __init__(self, run: Run, table: Tables):
        super().__init__(run, table)
        self.traced = _Traced(self.rule, table)

    def trace(self, z: Conditions, scale: Tensor, first: Tensor, noise: Tensor) -> Trace:
        """Denoise N rows; arguments as :meth:`Denoiser.__call__`."""
        out, states, means, log_stds = self.looped(HeadRows(z, scale, first, noise, self.traced))
        return Trace(torch.cat([states, out[:, None]], 1), Gaussian(means, log_stds))


def exponent(x: Tensor, kernel: Gaussian, widen: float = 1.0) -> Tensor:
    """-1/2 sum over channels of ((x - mean) / (widen std))^2."""
    return -0.5 * (((x - kernel.mean) * torch.exp(-kernel.log_std) / widen) ** 2).sum(-1)


class Drafted(NamedTuple):
    """An AR step's drafts: the draft model's z of it [B, n, C], and the paths of its B n tokens, image by image."""

    z: Conditions
    trace: Trace


class Models(NamedTuple):
    """What a mode works with, beside the target.

    Attributes:
        draft: the draft model.
        rows: the condition as the draft model reads it.
        transformer, draft_transformer: how the target's and the draft's transformer are evaluated.
        draws: random numbers of the approximate modes; None for those of the noise.
    """

    draft: MARModel
    rows: Rows
    transformer: Transformer
    draft_transformer: Transformer
    draws: RejectionDraws | None = None


class TwoModels:
    """Common part of the modes: two models on one canvas, prefill, drafting and counting."""

    def __init__(self, run: Run, settings: CSpDSettings, models: Models):
        self.settings = s = settings
        draft, self.transformer, self.draft_transformer = models.draft, models.transformer, models.draft_transformer
        self.alone = SpeculativeHead.of(run, self.transformer, s.speculation)
        self.noise = self.alone.noise
        self.own_noise = self.noise if s.alignment else RowNoise(run, "target", run.tables)
        # The draft model shares the canvas and the diffusion steps; its work is counted separately.
        scratch = Report("draft", draft.name, {}, None, run.report.images, run.report.device)
        self.draft_run = replace(run, model=draft, rows=models.rows, report=scratch)
        self.draft_head, self.head = TracedDenoiser(self.draft_run, run.tables), TracedDenoiser(run, run.tables)
        self.keys = row_keys(run.noise, "verify", run.tokens.shape[1]).to(run.tokens.device)
        self.draws = models.draws or PairedRejectionDraws(self.keys)
        draft.net.begin()
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
        both = {name: drafts.get(name, 0) for name in _BOTH} | {n: k for n, k in drafts.items() if n in PROMPT_COUNTS}
        run.report.add(**both, draft_passes=both["transformer_passes"], draft_head_calls=both["head_calls"])
        drafts.clear()
        if step + 1 == run.plan.steps:
            grid = run.model.net.config.grid
            run.report.maps["outcome"] = self.outcome.view(-1, grid, grid).cpu().numpy()
        return new

    def decide(self, run: Run, step: int) -> Tensor:
        """Tokens [B, n, channels] of an AR step after the prefill."""
        raise NotImplementedError

    def write(self, run: Run, where: Tensor, tokens: Tensor) -> None:
        """Put tokens [B, n, channels] on the canvas at positions [B, n]."""
        run.tokens = run.tokens.scatter(1, where[..., None].expand(-1, -1, tokens.shape[2]), tokens)

    def draft(self, run: Run, step: int) -> Drafted:
        """The draft model's tokens of an AR step, given the canvas; they are written to it."""
        with run.clock.phase("draft"):
            where = run.plan.ahead(step)
            self.draft_run.tokens = run.tokens
            z = self.draft_transformer(self.draft_run, step, where)
            trace = self.draft_head.trace(z.flat(), self.scale(run, step, where.numel()), *self.noise(*rows_at(where)))
            self.write(run, where, trace.path[:, -1].view(*where.shape, -1))
            return Drafted(z, trace)

    @staticmethod
    def scale(run: Run, step: int, rows: int) -> Tensor:
        """Guidance scale of an AR step, fp32 [rows, 1]."""
        return torch.full((rows, 1), run.plan.cfg[step], device=run.tokens.device)

    def record(self, run: Run, where: Tensor, ok: Tensor, host: Tensor) -> bool:
        """Count the drafts at positions [B, n] that were accepted; whether all were.

        Args:
            run, where: see above.
            ok: bool [B, n], on the device.
            host: the same on the host.
        """
        self.outcome.scatter_(1, where, torch.where(ok, ACCEPTED, REJECTED).to(torch.uint8))
        accepted = int(host.sum())
        run.report.add(accepted=accepted, rejected=host.numel() - accepted, restarts=int((~host).any(1).sum()))
        return accepted == host.numel()


class Segments(TwoModels):
    """Modes ``paper`` and ``lossless``: draft a segment of AR steps, keep the prefix that the target accepts.

    A batch advances with its slowest image. Drafts that other images had accepted beyond are made again from the same noise
    and judged with the same random numbers, so that an image's tokens do not depend on its batch.
    """

    def __init__(self, run: Run, settings: CSpDSettings, models: Models):
        super().__init__(run, settings, models)
        self.inner = settings.inner_temperature or 1.0
        self.length = settings.draft_length
        self.ready: dict[int, Tensor] = {}  # tokens of decided AR steps that the loop has not reached yet
        self.real = SpeculativeDenoiser(run, run.tables, settings.speculation)
        self.of_draft = SpeculativeDenoiser(self.draft_run, run.tables, 0)

    def decide(self, run: Run, step: int) -> Tensor:
        if step not in self.ready:
            self.segment(run, step)
        return self.ready.pop(step)

    def segment(self, run: Run, step: int) -> None:
        """Draft from AR step ``step`` on and verify; at least that step is decided."""
        # 1. Draft gamma AR steps.
        steps = range(step, min(step + self.length, run.plan.steps))
        drafted = [self.draft(run, s) for s in steps]
        where = run.plan.ahead(step, len(steps))
        shown = torch.zeros_like(self.outcome, dtype=torch.bool) if run.drafted is None else run.drafted
        run.drafted = shown.scatter(1, where, True)
        # 2. Verify them with the target, AR step by AR step, up to the first that is not accepted in full.
        kept, groups = 0, self.transformer.verify(run, step, len(steps))
        while kept < len(steps):
            with run.clock.phase("transformer"):
                zs = next(groups)
            group = steps[kept : kept + len(zs)]
            with run.clock.phase("head"):
                judged = self.judge(run, group, drafted[kept : kept + len(zs)], zs)
                for s, (tokens, ok, host) in zip(group, judged, strict=False):
                    self.ready[s] = tokens
                    self.write(run, run.plan.ahead(s), tokens)
                    if not self.record(run, run.plan.ahead(s), ok, host):
                        # 3. Discard the later drafts. The next segment has twice the accepted length.
                        self.length = min(self.settings.draft_length, max(1, 2 * kept))
                        self.draft_transformer.forget()
                        return
                    kept += 1
        self.length = min(self.settings.draft_length, 2 * kept)

    def judge(
        self, run: Run, steps: Sequence[int], drafted: Sequence[Drafted], zs: Sequence[Conditions]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Tokens [B, n, channels] of AR steps in turn, and which of them are the draft's, bool [B, n], also on the host."""
        raise NotImplementedError

    def rows(self, run: Run, steps: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Image, position and guidance scale of all rows of some AR steps, and the row numbers of each step."""
        places = [rows_at(run.plan.ahead(s)) for s in steps]
        image, position = (torch.cat(x) for x in zip(*places, strict=True))
        scale = torch.cat([self.scale(run, s, len(place[0])) for s, place in zip(steps, places, strict=True)])
        blocks = torch.arange(len(image), device=image.device).split([len(place[0]) for place in places])
        return image, position, scale, list(blocks)
