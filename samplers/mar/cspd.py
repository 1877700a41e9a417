"""CSpD: a small MAR drafts tokens, a large one (the target) verifies them.

Source: Wang et al. 2024, "Continuous Speculative Decoding for Autoregressive Image Generation" (arXiv 2411.11925), and its
published code. p is the target, q the draft. Two modes:

``lossless``: exactly the target's distribution, whatever the draft. The draft model samples some AR steps; the target's z of each is
computed given the drafts before it, in one pass; the target's head is evaluated at all states of the drafted diffusion paths in one
batch. A path is kept up to its first rejected diffusion step, which is replaced by a coupling of the two Gaussians (``coupling.py``), and
the target samples the rest. So every token is a sample of the target given the tokens before it, and depends neither on the draft length
nor on the batch. A token counts as accepted if its whole path is the draft's. After the first AR step with a rejected token the target's z
was computed from discarded tokens: all later drafts are discarded. Two different models rarely agree on a whole path, because the last
diffusion steps are almost without noise.

``published``: the rule of the published code; approximate. Each model follows its own trajectory. A token is accepted with probability
min(1, p(x) / (Sigma q(x))), where p and q are the last diffusion step's densities with stds multiplied by 42, and Sigma is the product of
sigma_q / sigma_p over the other steps (the paper multiplies by it). Drafts are judged given the tokens of the last verification, and all
accepted ones are kept whatever happened to those before; the guidance scale is that of the segment's last AR step. A rejected token is
drawn again from p, at most 100 times, and kept with probability max(0, 1 - q / (Sigma p)), stds not multiplied; it is zero if no draw
is.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import UserError
from ...model_loaders.networks.mar import MARModel
from ...reports.record import ACCEPTED, DRAFTED, PLAIN, PROMPT_COUNTS, REJECTED, Report
from ..conditioning import MaskedCondition
from ..editing import Edit
from ..noise import CounterRNG, PairedNoise, row_keys
from .coupling import Gaussian
from .diffusion import Head, HeadBatch, ancestral_steps
from .loop import FullTransformer, Run, Sampler, Transformer, begin
from .mar import plain_steps
from .memory import WEIGHTS
from .settings import CSpDSettings
from .speculative import Drafts, Paths

# Counts of the report that are both models' together.
_BOTH = ("transformer_passes", "transformer_tokens", "head_calls", "head_rows")
# Published: factor of the last step's stds, and redraws of a rejected token, of which so many are computed at once.
INNER_TEMPERATURE, TRIES, _BLOCK = 42.0, 100, 10
# Published: lanes of a token's random numbers, after those of its diffusion steps (speculative.py).
_GUESS, _NORMAL, _UNIFORM = range(1 << 20, (1 << 20) + 3)


def _check(draft: MARModel, target: MARModel) -> None:
    """Raise a UserError if the models differ in tokens, grid, condition, classes, diffusion or device."""
    d, t = draft.net.config, target.net.config
    pairs = {
        "channels per token": (d.channels, t.channels),
        "latent scale": (draft.latent_scale, target.latent_scale),
        "patch": (draft.patch, target.patch),
        "tokens": (d.tokens, t.tokens),
        "the kind of condition": (draft.condition, target.condition),
        "classes": (d.classes, t.classes),
        "the largest beta of their diffusion": (draft.max_beta, target.max_beta),
        "label set": (draft.label_set or target.label_set, target.label_set or draft.label_set),
        "device": (next(draft.net.parameters()).device, next(target.net.parameters()).device),
    }
    for what, (theirs, ours) in pairs.items():
        if theirs != ours:
            raise UserError(
                f"draft: {draft.name} and the target {target.name} differ in {what}, {theirs} and {ours}; "
                "take a draft that was trained on the target's tokens and classes."
            )


def cspd(
    model: MARModel,
    condition: MaskedCondition,
    settings: CSpDSettings,
    noise: PairedNoise,
    seed: int | None = None,
    transformer: Transformer | None = None,
    edit: Edit | None = None,
    *,
    draft: MARModel,
    draft_transformer: Transformer | None = None,
    draws: RejectionDraws | None = None,
) -> Sampler:
    """CSpD with ``model`` as target; arguments as :func:`samplers.mar.mar.mar`, and:

    Args:
        transformer, draft_transformer: how the two models' transformers are evaluated; None for in full. The target's runs at
            verifications and in the prefill only.
        draft: the model that drafts.
        draws: random numbers of mode ``published``; None for those of the noise.

    Passes and head calls in the report are both models' together; ``draft_passes`` and ``draft_head_calls`` say how many were the draft's.

    Raises:
        UserError: as :func:`samplers.mar.mar.mar`; a draft of other tokens, grid, classes or on another device.
    """
    _check(draft, model)
    transformer = transformer or FullTransformer()
    run = begin("cspd", model, condition, settings, noise, seed, edit, transformer)
    run.report.model = f"{model.name}, drafted by {draft.name}"
    run.report.memory |= {f"{WEIGHTS}draft {name}": count for name, count in draft.weights().items()}
    draft_transformer = draft_transformer or FullTransformer()
    with torch.no_grad():
        draft_run = draft_of(run, draft, condition)
        draft_transformer.begin(draft_run)
    both = (run, draft_run, transformer, draft_transformer, settings)
    return (yield from lossless_steps(*both) if settings.mode == "lossless" else published_steps(*both, draws))


# ------------------------------------------------------------------------------------------------ lossless


@torch.no_grad()
def lossless_steps(
    run: Run, draft_run: Run, transformer: Transformer, draft_transformer: Transformer, s: CSpDSettings
) -> Sampler:
    """The AR steps of mode ``lossless``: draft a segment, keep the prefix that the target accepts.

    A batch advances with its slowest image. Drafts that others had accepted beyond are made again from the same noise and judged with the
    same random numbers, so that an image's tokens do not depend on its batch.
    """
    plan, table, temperature = run.plan, run.tables, run.settings.temperature
    start, noise = run.draws("full", len(table))
    keys = row_keys(run.noise, "verify", plan.tokens).to(start.device)
    outcome = torch.full(run.tokens.shape[:2], PLAIN, dtype=torch.uint8, device=start.device)
    # 0. Prefill: the first AR steps are the target's alone.
    step, length = prefill_steps(plan.steps, s.prefill_ratio), s.draft_length
    yield from plain_steps(run, transformer, [table] * plan.steps, s.speculation, step)
    while step < plan.steps:
        # 1. Draft gamma AR steps.
        segment = range(step, min(step + length, plan.steps))
        drafted = [draft_step(run, draft_run, draft_transformer, t, start, noise) for t in segment]
        shown = torch.zeros_like(outcome, dtype=torch.bool) if run.drafted is None else run.drafted
        run.drafted = shown.scatter(1, plan.ahead(step, len(segment)), True)
        # 2. Verify them with the target, AR step by AR step, up to the first that is not accepted in full.
        done, accepted, passes = step, True, transformer.verify(run, step, len(segment))
        while accepted and done < segment.stop:
            with run.clock.phase("transformer"):
                zs = next(passes)  # of one or more AR steps, [P, B, n, C] each
            with run.clock.phase("head"):
                group = range(done, done + len(zs))
                b, p = (torch.cat(x) for x in zip(*(rows_at(plan.ahead(t)) for t in group), strict=True))
                z = torch.cat([z.flatten(1, 2) for z in zs], 1)
                batch = HeadBatch(z, plan.scale[b, p, None], start[b, p], noise[:, b, p], table)
                paths = Paths(run, batch, s.speculation, CounterRNG(keys[b, p]))
                traces = drafted[done - step : done - step + len(zs)]
                path = torch.cat([trace.path for trace in traces])
                mean, log_std = (torch.cat(x) for x in zip(*(trace.kernel for trace in traces), strict=True))
                log_std += math.log(temperature) if temperature else -math.inf
                log_std[:, -1] = -math.inf  # the last step has no noise
                every = torch.arange(len(path), device=path.device)
                drafts = Drafts(path, Gaussian(mean, log_std), torch.full_like(every, len(table)))
                kept = paths.verify(every, drafts)
                run.report.add(drafted_steps=len(path) * len(table))
                for rows in every.split([len(run.tokens) * z.shape[2] for z in zs]):
                    # The rest of each path is the target's.
                    here, ok = plan.ahead(done), (kept[rows] == len(table)).view(len(run.tokens), -1)
                    run.report.add(accepted_steps=int(kept[rows].sum()))
                    run.tokens[b[rows], p[rows]] = paths.finish(rows)
                    accepted = judged(run, outcome, here, ok)
                    done += 1
                    if not accepted:
                        break
        # 3. Discard the later drafts. The next segment has at most twice the accepted length.
        count_draft(run, draft_run)
        if not accepted:
            draft_transformer.forget()
        length = min(s.draft_length, max(1, 2 * (done - step - (not accepted))))
        for t in range(step, done):
            with run.clock.paused():
                yield run.step(t)
        step = done
    return run.finish(outcome)


# ------------------------------------------------------------------------------------------------ published


class RejectionDraws:
    """Random numbers of mode ``published``, by image and position int64 [N], of keys int64 [B, L]; a test injects recorded ones."""

    def __init__(self, keys: Tensor):
        self.keys = keys

    def guess(self, image: Tensor, position: Tensor) -> Tensor:
        """Uniform fp32 [N] to compare a draft's ratio with."""
        return CounterRNG(self.keys[image, position]).uniform(_GUESS)[:, 0]

    def again(self, image: Tensor, position: Tensor, first: int, count: int, channels: int) -> tuple[Tensor, Tensor]:
        """Redraws ``first ..``: standard normals fp32 [N, count, channels], and uniforms fp32 [N, count] for their acceptance."""
        rng = CounterRNG(self.keys[image, position])
        return rng.normal(_NORMAL, first, count, channels), rng.uniform(_UNIFORM, first, count)


class LastStep(NamedTuple):
    """The part of a diffusion path that the published code stores, fp32 [..., channels] each."""

    mean: Tensor  # of the last step
    log_std: Tensor
    rest: Tensor  # sum of the other steps' log stds

    def at(self, *index: Tensor | None) -> LastStep:
        """Some rows."""
        return LastStep(*(x[index] for x in self))


def last_step(kernel: Gaussian, temperature: float = 1.0) -> LastStep:
    """The stored part of a path's kernels. The last step's stds include the temperature, although that step adds no noise."""
    mean, log_std = kernel
    # At temperature 0 the published code divides 0 by 0; here all drafts are then rejected and the target's means taken.
    return LastStep(mean[:, -1], log_std[:, -1] + math.log(max(temperature, 1e-6)), log_std[:, :-1].sum(1))


def published_ratio(token: Tensor, q: LastStep, p: LastStep, inner: float = INNER_TEMPERATURE) -> Tensor:
    """log of the published code's acceptance ratio p / (Sigma q), fp32 [...], of tokens [..., channels]."""

    def exponent(last: LastStep) -> Tensor:
        return -0.5 * (((token - last.mean) * torch.exp(-last.log_std) / inner) ** 2).sum(-1)

    return (p.rest - q.rest + q.log_std - p.log_std).sum(-1) + exponent(p) - exponent(q)


def published_keep(token: Tensor, q: LastStep, p: LastStep) -> Tensor:
    """Probability fp32 [...] that the published code accepts a redraw [..., channels]: max(0, p - q / Sigma) / p."""
    return (1 - torch.exp(-published_ratio(token, q, p, 1.0))).clamp(min=0)


@torch.no_grad()
def published_steps(
    run: Run,
    draft_run: Run,
    transformer: Transformer,
    draft_transformer: Transformer,
    s: CSpDSettings,
    draws: RejectionDraws | None = None,
) -> Sampler:
    """The AR steps of mode ``published``: draft AR steps one by one, judge them a segment at a time, replace rejected tokens."""
    plan, table, inner = run.plan, run.tables, s.inner_temperature or INNER_TEMPERATURE
    start, noise = run.draws("full", len(table))
    own_start, own_noise = (start, noise) if s.alignment else run.draws("target", len(table))
    draws = draws or RejectionDraws(row_keys(run.noise, "verify", plan.tokens).to(start.device))
    outcome = torch.full(run.tokens.shape[:2], PLAIN, dtype=torch.uint8, device=start.device)
    # 0. Prefill: the first AR steps are the target's alone.
    first = prefill_steps(plan.steps, s.prefill_ratio)  # the first AR step that is not verified yet
    yield from plain_steps(run, transformer, [table] * plan.steps, s.speculation, first)
    drafted = LastStep(*(torch.zeros_like(run.tokens) for _ in range(3)))
    for step in range(first, plan.steps):
        # 1. Draft an AR step.
        trace = draft_step(run, draft_run, draft_transformer, step, start, noise)
        b, p = rows_at(plan.ahead(step))
        for kept, new in zip(drafted, last_step(trace.kernel, run.settings.temperature), strict=True):
            kept[b, p] = new
        outcome[b, p] = DRAFTED
        if step % s.draft_length == 0 or step + 1 == plan.steps:
            # 2. The target's own paths of all tokens since the last verification, given those before it.
            here = plan.ahead(first, step + 1 - first)
            with run.clock.phase("transformer"):
                z = transformer(run, first, here)
            with run.clock.phase("head"):
                b, p = rows_at(here)
                cfg = torch.full((len(b), 1), plan.cfg[step], device=z.device)
                target = traced(run, HeadBatch(z.flatten(1, 2), cfg, own_start[b, p], own_noise[:, b, p], table))
                theirs = last_step(target.kernel, run.settings.temperature)
                mine, tokens = drafted.at(b, p), run.tokens[b, p]
                # 3. Accept with probability min(1, ratio).
                ok = published_ratio(tokens, mine, theirs, inner) > draws.guess(b, p).log()
                # 4. Draw the rejected tokens again.
                bad = (~ok).nonzero()[:, 0]
                tokens[bad] = redrawn(draws, b[bad], p[bad], mine.at(bad), theirs.at(bad))
                run.tokens[b, p] = tokens
                if not judged(run, outcome, here, ok.view(here.shape)):
                    draft_transformer.forget()
            first = step + 1
        count_draft(run, draft_run)
        with run.clock.paused():
            yield run.step(step)
    return run.finish(outcome)


def redrawn(draws: RejectionDraws, image: Tensor, position: Tensor, q: LastStep, p: LastStep) -> Tensor:
    """For each of N rows the first of :data:`TRIES` draws of p's kernel that is kept, fp32 [N, channels]; 0 if none is."""
    out, todo = torch.zeros_like(p.rest), torch.arange(len(image), device=image.device)
    for first in range(0, TRIES, _BLOCK):
        if not len(todo):
            break
        mine, theirs = q.at(todo, None), p.at(todo, None)
        normals, uniforms = draws.again(image[todo], position[todo], first, _BLOCK, out.shape[1])
        drawn = theirs.mean + theirs.log_std.exp() * normals
        hit = published_keep(drawn, mine, theirs) > uniforms
        index = hit.to(torch.uint8).argmax(1)[:, None, None].expand(-1, 1, drawn.shape[2])
        found = hit.any(1)
        out[todo[found]] = drawn.gather(1, index)[found, 0]
        todo = todo[~found]
    return out


# ------------------------------------------------------------------------------------------------ both modes


class Trace(NamedTuple):
    """The diffusion paths of N rows."""

    path: Tensor  # states fp32 [N, S + 1, channels], start noise first, token last
    kernel: Gaussian  # the learned kernel of each step, fp32 [N, S, channels], the last one's too; stds without the temperature


def traced(run: Run, batch: HeadBatch) -> Trace:
    """The diffusion paths of a batch; the head is never cached."""
    head, steps = Head(run.model.net, batch), ancestral_steps(run, batch)
    states, means, log_stds = [batch.x], [], []
    for k, step in enumerate(steps):
        x, mean, log_std = step(states[-1], head(k, states[-1]))
        states.append(x)
        means.append(mean)
        log_stds.append(log_std)
    run.report.add(head_calls=len(steps), head_rows=len(steps) * head.branches * head.tokens)
    return Trace(torch.stack(states, 1), Gaussian(torch.stack(means, 1), torch.stack(log_stds, 1)))


def rows_at(where: Tensor) -> tuple[Tensor, Tensor]:
    """Image and position, int64 [B n] each, of positions [B, n]."""
    image = torch.arange(len(where), device=where.device)[:, None].expand_as(where)
    return image.flatten(), where.flatten()


def draft_of(run: Run, draft: MARModel, condition: MaskedCondition) -> Run:
    """The draft model's generation: the same tokens and diffusion steps, and a report of its own."""
    report = Report("draft", draft.name, {}, None, run.report.images, run.report.device)
    return replace(run, model=draft, rows=condition.rows(draft, run.guided), report=report)


def prefill_steps(ar_steps: int, ratio: float) -> int:
    """AR steps of the target alone at the beginning: steps 0 .. S ratio, as the reference."""
    return min(ar_steps, int(ar_steps * ratio) + 1)


def draft_step(run: Run, draft_run: Run, transformer: Transformer, step: int, start: Tensor, noise: Tensor) -> Trace:
    """The draft model's tokens of an AR step, given the tokens so far; they are written to the target's."""
    with run.clock.phase("draft"):
        here = run.plan.ahead(step)
        b, p = rows_at(here)
        draft_run.tokens = run.tokens
        z = transformer(draft_run, step, here)
        batch = HeadBatch(z.flatten(1, 2), run.plan.scale[b, p, None], start[b, p], noise[:, b, p], run.tables)
        trace = traced(draft_run, batch)
        run.tokens[b, p] = trace.path[:, -1]
        return trace


def count_draft(run: Run, draft_run: Run) -> None:
    """Move the draft model's work into the report."""
    drafts = draft_run.report.counts
    both = {name: drafts.get(name, 0) for name in _BOTH} | {n: k for n, k in drafts.items() if n in PROMPT_COUNTS}
    run.report.add(**both, draft_passes=both["transformer_passes"], draft_head_calls=both["head_calls"])
    drafts.clear()


def judged(run: Run, outcome: Tensor, where: Tensor, ok: Tensor) -> bool:
    """Record which drafts at positions [B, n] were accepted, bool [B, n]; whether all were."""
    outcome.scatter_(1, where, torch.where(ok, ACCEPTED, REJECTED).to(torch.uint8))
    ok = ok.cpu()
    accepted = int(ok.sum())
    run.report.add(accepted=accepted, rejected=ok.numel() - accepted, restarts=int((~ok).any(1).sum()))
    return accepted == ok.numel()
