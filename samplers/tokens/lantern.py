"""For comparison only: relaxed speculative decoding in LANTERN's style, on one resolution and in raster order.

Sources: Jang et al. 2025, "LANTERN: Accelerating Visual Autoregressive Models with Relaxed Speculative Decoding" (ICLR 2025,
arXiv 2410.03355), and LANTERN++ (arXiv 2502.06352). A drafted token may borrow the probability of its code's nearest
neighbours; the first rejection throws the rest of the draft away. MuLo-SD (``mulosd.py``) is measured against that.

*This is not LANTERN*: its draft models are small heads trained for one target (EAGLE), and it drafts trees. Here any model
of the same codes and grid drafts a chain: a smaller one, or the target itself without guidance. What is LANTERN's are the
rules of acceptance and of what is drawn after a rejection.

Images of a batch go their own ways, so that each is what it would be alone. The host waits once a cycle: how many cycles
follow depends on what was accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...errors import UserError
from ...model_loaders.networks.gpt import Cache, TokenModel
from ...model_loaders.networks.vq import VQModel
from ...reports.record import ACCEPTED, PLAIN, REJECTED
from ..conditioning import AnyCondition
from ..driver import PauseClock
from .draws import Draws, allowed, draw
from .islands import codebook_neighbours
from .llamagen import raster
from .loop import TokenRun, TokenSampled, TokenSampler, TokenStep, begin
from .mulosd import pooling, same_codes
from .settings import CERTAIN, LanternSettings

# ------------------------------------------------------------------------------------------------ the rules


def relaxed(p: Tensor, x: Tensor, nearest: Tensor, delta: float) -> tuple[Tensor, Tensor]:
    """What a draft's probability counts as.

    Neighbours lend theirs, the nearest first, as long as all they lend stays within ``delta`` (the total variation distance that
    moving it costs); above 1, within delta - 1 times the draft's own (LANTERN++'s lambda).

    Args:
        p: target's probabilities fp32 [..., V].
        x: drafts int64 [...].
        nearest: int [V, k], neighbours of every code without itself, nearest first.
        delta: see above.

    Returns:
        fp32 [...], and bool [...]: whether any neighbour lent.
    """
    own = p.gather(-1, x[..., None])
    if not nearest.shape[1]:
        return own[..., 0], torch.zeros_like(x, dtype=torch.bool)
    lent = p.gather(-1, nearest[x].long()).cumsum(-1)
    count = (lent <= ((delta - 1) * own if delta > 1 else delta)).sum(-1, keepdim=True)
    most = lent.gather(-1, (count - 1).clamp(min=0))
    return (own + torch.where(count > 0, most, 0))[..., 0], count[..., 0] > 0


def certain_rest(p: Tensor, x: Tensor, lent: Tensor, nearest: Tensor) -> Tensor:
    """What is drawn from after a rejection if the draft was the only choice: p without it and, where neighbours had lent, without
    all of ``nearest`` (the published code takes one neighbour more than those that may lend).

    Args:
        p: fp32 [..., V].
        x: int64 [...].
        lent: bool [...], from :func:`relaxed`.
        nearest: int [V, k + 1].

    Returns:
        Probabilities fp32 [..., V]; uniform where nothing is left.
    """
    out = p.scatter(-1, x[..., None], 0.0)
    return _normal(_without(out, x, lent, nearest))


def drafted_rest(p: Tensor, q: Tensor, x: Tensor, lent: Tensor, nearest: Tensor) -> Tensor:
    """The same if the draft was drawn from q fp32 [..., V]: what p has more than q, neighbours that lent keeping all of theirs."""
    return _normal((p - _without(q, x, lent, nearest)).clamp(min=0))


def _without(p: Tensor, x: Tensor, lent: Tensor, nearest: Tensor) -> Tensor:
    return torch.where(lent[..., None], p.scatter(-1, nearest[x].long(), 0.0), p)


def _normal(p: Tensor) -> Tensor:
    total = p.sum(-1, keepdim=True)
    return torch.where(total > 0, p / total, 1 / p.shape[-1])


def likeliest(p: Tensor, x: Tensor, nearest: Tensor, delta: float) -> Tensor:
    """Greedy acceptance, bool [...]: whether the draft is the likeliest value once its neighbours have lent. As :func:`relaxed`."""
    count = relaxed(p, x, nearest, delta)[0]
    return p.scatter(-1, x[..., None], count[..., None]).argmax(-1) == x


# ------------------------------------------------------------------------------------------------ the sampler


@dataclass(eq=False)
class _Side:
    """One of the two models, and its cache."""

    run: TokenRun
    cache: Cache

    @property
    def both(self) -> bool:
        return any(self.run.guided)

    def feed(self, cells: Tensor, end: int) -> Tensor:
        """Logits after guidance [B, m, V] of what comes after the cells int64 [B, m]; cells outside the grid are fillers."""
        run, last = self.run, self.run.model.tokens - 1
        inside = (cells >= 0) & (cells < last)
        hidden = run.feed_each(torch.where(inside, cells, last), self.cache, self.both, min(end, last))
        guided: bool | Tensor = self.both
        if self.both and run.settings.cfg_interval >= 0:
            guided = cells <= run.settings.cfg_interval
        return run.mix(run.model.net.logits(hidden), guided)

    def probabilities(self, logits: Tensor) -> Tensor:
        """fp32 [..., V] that tokens are drawn from; at temperature 0 the untempered ones, by which greedy drafts are judged."""
        s = self.run.settings
        return (
            logits.softmax(-1)
            if s.temperature == 0
            else allowed(logits / max(s.temperature, 1e-5), s.top_k, s.top_p).softmax(-1)
        )


def lantern(
    target: TokenModel,
    condition: AnyCondition,
    settings: LanternSettings,
    noise: Draws,
    seed: int | None = None,
    *,
    draft: TokenModel,
    vq: VQModel,
) -> TokenSampler:
    """The comparison described above.

    With ``neighbours`` 0 the pictures have exactly the target's distribution, and at temperature 0 they are the target's.

    Args:
        target, condition, noise, seed: as :func:`samplers.tokens.llamagen.llamagen`; the condition is both models'.
        settings: see :class:`LanternSettings`.
        draft: a model of the same codes and grid; the target itself will do.
        vq: the tokenizer of both, whose codebook says which codes are neighbours.

    Yields:
        :class:`TokenStep` after every verification; ``total`` is what it would be at the present pace.

    Returns:
        :class:`TokenSampled`. The report counts all passes, the draft's among them, and of the drafts that were judged the
        accepted and the rejected ones.

    Raises:
        UserError: a condition that does not fit either model, models or a tokenizer that do not belong together, a PAR, neighbours
            that leave nothing to be rejected.
    """
    same_codes(target, draft, vq.net.config.codes, "the LANTERN-style comparison")
    if draft.grid != target.grid:
        raise UserError(
            f"draft: {draft.name} draws {draft.grid} x {draft.grid} tokens, {target.name} {target.grid} x {target.grid}; this comparison "
            "drafts at the same size."
        )
    k = pooling(settings, target.net.config.vocab)
    run = begin("lantern", target, condition, settings, noise, seed, raster(target.grid))
    drafter = begin(
        "lantern", draft, condition, replace(settings, cfg=settings.draft_cfg), noise, seed, raster(target.grid)
    )
    drafter.report, report, clock = run.report, run.report, run.clock
    batch, count, device = len(run.tokens), target.tokens, run.tokens.device
    run.tokens = drafter.tokens = torch.zeros(batch, count + 1, dtype=torch.int64, device=device)
    fixed = torch.full((batch, count), -1, dtype=torch.int32, device=device)
    outcome = torch.full((batch, count), PLAIN, dtype=torch.uint8, device=device)
    cells, images = torch.arange(count, device=device), torch.arange(batch, device=device)
    known = torch.ones(batch, dtype=torch.int64, device=device)  # tokens of each image
    judged = torch.zeros(2, dtype=torch.int64, device=device)  # accepted, rejected
    greedy = settings.temperature == 0
    with torch.inference_mode():
        table = codebook_neighbours(vq.net.quantize, k + 1 if k else 0, device)[:, 1:]
        with clock.phase("transformer"):
            logits, cache = run.prefill(any(run.guided), count)
        with clock.phase("draft"):
            sides = _Side(run, cache), _Side(drafter, drafter.prefill(any(drafter.guided), count)[1])
        with clock.phase("sampling"):
            logits = run.mix(logits[:, None], any(run.guided))
            run.tokens[:, :1] = draw(logits, settings, noise.gumbel("token", cells[:1], logits.shape[-1]))
            fixed[:, 0] = 0
    report.add(draft_passes=1, cache_bytes=sides[0].cache.bytes + sides[1].cache.bytes)
    done, least, most, pause = 2, 1, 1, PauseClock()

    def step() -> TokenStep:
        decided = cells < known[:, None]
        shape = (batch, target.grid, target.grid)
        codes = run.tokens[:, :-1].clone().masked_fill(~decided, 0)
        total = done if least >= count else max(done + 1, round(done * count / least))
        return TokenStep(done, total, codes.view(shape), decided.view(shape), report)

    while least < count:
        pause.start()
        pause.stop((yield step()))
        with torch.inference_mode():
            likely = []
            # Not beyond the last cell of the image that is least far; the others' own last cells come before that.
            gamma = min(settings.draft_length, count - least)
            for j in range(gamma):
                with clock.phase("draft"):
                    # The token before the newest may be a draft that was kept and never read.
                    fed = known[:, None] + torch.arange(j - 2 if not j else j - 1, j, device=device)
                    logits = sides[1].feed(fed, most + j)[:, -1:]
                report.add(draft_passes=1)
                with clock.phase("sampling"):
                    at = (known + j).clamp(max=count)[:, None]
                    run.tokens.scatter_(
                        1, at, draw(logits, drafter.settings, noise.gumbel("draft", at, logits.shape[-1]))
                    )
                    likely.append(sides[1].probabilities(logits))
            with clock.phase("transformer"):
                logits = sides[0].feed(known[:, None] + torch.arange(-1, gamma, device=device), most + gamma)
            done += gamma + 1
            with clock.phase("sampling"):
                at = known[:, None] + torch.arange(gamma, device=device)
                x, valid = run.tokens.gather(1, at.clamp(max=count)), at < count
                p, q = sides[0].probabilities(logits[:, :-1]), torch.cat(likely, dim=1)
                if greedy:
                    kept = likeliest(p, x, table[:, :k], settings.delta)
                    rest = logits[:, :-1]
                else:
                    counted, lent = relaxed(p, x, table[:, :k], settings.delta)
                    if settings.drafts == CERTAIN:
                        rest = certain_rest(p, x, lent, table).log()
                    else:
                        counted, rest = (
                            counted / q.gather(-1, x[..., None])[..., 0],
                            drafted_rest(p, q, x, lent, table).log(),
                        )
                    # The Gumbel number of one value, made uniform again.
                    roll = noise.gumbel("accept", at.clamp(max=count), 1)[..., 0].double().neg().exp().neg().exp()
                    kept = roll <= counted
                run_length = (kept & valid).cumprod(1).sum(1)
                # Behind the last kept draft comes what a rejection leaves, or what the target says after all of them.
                after = torch.cat([rest, logits[:, -1:]], dim=1)[images, run_length][:, None]
                end = (known + run_length).clamp(max=count)[:, None]
                plain = run_length == gamma
                gumbel = noise.gumbel("token", end, after.shape[-1])
                free = draw(after, settings, gumbel)
                new = free if greedy else torch.where(plain[:, None], free, (after + gumbel).argmax(-1))
                run.tokens.scatter_(1, end, new)
                fresh = (cells >= known[:, None]) & (cells <= end)
                fixed.masked_fill_(fresh, done - 1)
                outcome.masked_fill_(fresh & (cells < end), ACCEPTED)
                down = ~plain & (end[:, 0] < count)
                outcome.masked_fill_((cells == end) & down[:, None], REJECTED)
                judged += torch.stack([run_length.sum(), down.sum()])
                known = (end[:, 0] + 1).clamp(max=count)
                least, most = (int(n) for n in torch.aminmax(known))  # the host waits here
    yield step()
    clock.stop(report, pause.seconds)
    if device.type == "cuda":
        report.peak_memory_bytes = torch.cuda.max_memory_allocated(device)
    accepted, rejected = judged.tolist()
    report.add(accepted=accepted, rejected=rejected)
    shape = (batch, target.grid, target.grid)
    report.maps.update(step=fixed.view(shape).cpu().numpy(), outcome=outcome.view(shape).cpu().numpy())
    return TokenSampled(run.tokens[:, :-1].clone().view(shape), report)
