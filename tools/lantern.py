"""For comparison only: relaxed speculative decoding in LANTERN's style, on one resolution and in raster order.

Sources: Jang et al. 2025, "LANTERN: Accelerating Visual Autoregressive Models with Relaxed Speculative Decoding" (ICLR 2025, arXiv
2410.03355), and LANTERN++ (arXiv 2502.06352). The acceptance test of a draft token may add the probability of its code's nearest
neighbours. The first rejection discards the rest of the draft. MuLo-SD (``samplers/tokens/mulosd.py``) is compared with this.

*This is not LANTERN*: its draft models are small heads trained for one target (EAGLE), and they draft trees. Here any model
of the same codes and grid drafts a chain: a smaller one, or the target itself without guidance. The rules of acceptance and
of resampling after a rejection are LANTERN's.

A cycle:

1. the draft model draws gamma tokens one after another;
2. one pass of the target gives the distributions p of these tokens and of the one behind them;
3. tokens are accepted up to the first that fails the relaxed test;
4. the next token is drawn: after a rejection from the residual distribution, otherwise from the target's prediction.

Images advance independently, so that each equals the image generated alone.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import UserError
from ..model_loaders.networks.autoencoder import VQModel
from ..model_loaders.networks.llama import Cache, TokenModel
from ..reports.record import ACCEPTED, PLAIN, REJECTED
from ..samplers.conditioning import AnyCondition
from ..samplers.driver import timed
from ..samplers.registry import LLAMAGEN, TAR, Entry
from ..samplers.registry import find as registered
from ..samplers.settings import knob
from ..samplers.tokens.draws import PairedDraws, draw, tempered
from ..samplers.tokens.islands import codebook_neighbours
from ..samplers.tokens.loop import (
    TokenRun,
    TokenSampled,
    TokenSampler,
    begin,
    feed,
    guide,
    prefill,
    resolve,
)
from ..samplers.tokens.mulosd import check_pair, neighbour_count
from ..samplers.tokens.schedule import raster
from ..samplers.tokens.settings import TokenSettings

DRAFTED, CERTAIN = "drafted", "certain"


# fmt: off
@dataclass(frozen=True)
class LanternSettings(TokenSettings):
    """Comparison in LANTERN's style (ICLR 2025): relaxed acceptance in raster order; the first rejection discards the rest."""

    draft_length: int = knob(4, "Tokens drafted before the target verifies them; more means fewer passes of the target and more drafts "
        "thrown away. Usual: 4.", low=1, high=256, step=1, symbol="gamma", unit="tokens")
    delta: float = knob(0.4, "How much probability of similar codes may count for a drafted one. Higher accepts more and is further "
        "from the target. Usual: 0.1 to 0.4. Above 1 it is LANTERN++'s lambda, and delta - 1 times the drafted code's own probability "
        "may count.", low=0.0, high=100.0, step=0.05, symbol="delta")
    neighbours: int = knob(-1, "How many similar codes may count. Usual: -1, LANTERN's share of the codebook (1000 of 16,384). 0 is "
        "plain speculative decoding, whose pictures have exactly the target's distribution.", low=-1, high=65536, step=1, symbol="k")
    draft_cfg: float = knob(1.0, "Guidance of the draft model. At 1 it has none and does half the work; the nearer to cfg, the more "
        "drafts are kept.", low=1.0, high=20.0, step=0.05, advanced=True)
    drafts: str = knob(DRAFTED, "How likely a draft counts as having been. drafted: as likely as the draft model made it (the published "
        "static tree); certain: as if it were the only choice (the published dynamic tree), which keeps fewer.",
        choices=(DRAFTED, CERTAIN), advanced=True)

    def exact(self, side: int) -> bool:
        return self.neighbours == 0 and self.temperature == 0

    def lossless(self) -> bool:
        return self.neighbours == 0 and self.temperature > 0
# fmt: on


def relaxed(p: Tensor, x: Tensor, nearest: Tensor, delta: float) -> tuple[Tensor, Tensor]:
    """Relaxed probabilities fp32 [...] of draft tokens x int64 [...], and whether any neighbour was added, bool [...].

    The probabilities p fp32 [..., V] of the neighbours in ``nearest``, int [V, k], are added, the nearest first, while their sum is at most
    ``delta``; above 1, while it is at most delta - 1 times the token's own probability (LANTERN++'s lambda).
    """
    own = p.gather(-1, x[..., None])
    if not nearest.shape[1]:
        return own[..., 0], torch.zeros_like(x, dtype=torch.bool)
    added = p.gather(-1, nearest[x].long()).cumsum(-1)
    count = (added <= ((delta - 1) * own if delta > 1 else delta)).sum(-1, keepdim=True)
    most = added.gather(-1, (count - 1).clamp(min=0))
    return (own + torch.where(count > 0, most, 0))[..., 0], count[..., 0] > 0


def certain_rest(p: Tensor, x: Tensor, pooled: Tensor, nearest: Tensor) -> Tensor:
    """Residual distribution fp32 [..., V] after a rejection if the draft distribution was concentrated on x; uniform where nothing is left.

    It is p without x and, where neighbours were added (``pooled`` of :func:`relaxed`), without all of ``nearest``, int
    [V, k + 1]: the published code removes one neighbour more than those that may be added.
    """
    out = p.scatter(-1, x[..., None], 0.0)
    return _normalised(_without_neighbours(out, x, pooled, nearest))


def drafted_rest(p: Tensor, q: Tensor, x: Tensor, pooled: Tensor, nearest: Tensor) -> Tensor:
    """Residual distribution after a rejection if x was drawn from q fp32 [..., V]: max(p - q, 0), normalised.

    Where neighbours were added, q is zero for all of ``nearest``. Other arguments as for :func:`certain_rest`.
    """
    return _normalised((p - _without_neighbours(q, x, pooled, nearest)).clamp(min=0))


def _without_neighbours(p: Tensor, x: Tensor, pooled: Tensor, nearest: Tensor) -> Tensor:
    return torch.where(pooled[..., None], p.scatter(-1, nearest[x].long(), 0.0), p)


def _normalised(p: Tensor) -> Tensor:
    total = p.sum(-1, keepdim=True)
    return torch.where(total > 0, p / total, 1 / p.shape[-1])


def likeliest(p: Tensor, x: Tensor, nearest: Tensor, delta: float) -> Tensor:
    """Greedy acceptance, bool [...]: whether x is the argmax of p with its relaxed probability. Arguments: :func:`relaxed`."""
    probability = relaxed(p, x, nearest, delta)[0]
    return p.scatter(-1, x[..., None], probability[..., None]).argmax(-1) == x


def lantern(
    target: TokenModel,
    condition: AnyCondition,
    settings: LanternSettings,
    noise: PairedDraws,
    seed: int | None = None,
    *,
    draft: TokenModel,
    vq: VQModel,
) -> TokenSampler:
    """Speculative decoding as described above; arguments as :func:`samplers.tokens.mulosd.mulosd`'s, and ``vq``, the tokenizer of both
    models. ``draft`` may be the target. With ``neighbours`` 0 the images have exactly the target's distribution.

    Raises: UserError: inputs that do not belong together, or so many neighbours that nothing can be rejected.
    """
    check_pair(target, draft, vq.net.config.codes, "the LANTERN-style comparison")
    if draft.grid != target.grid:
        sizes = f"{draft.grid} x {draft.grid} tokens, {target.name} {target.grid} x {target.grid}"
        raise UserError(f"draft: {draft.name} draws {sizes}; this comparison drafts at the same size.")
    k = neighbour_count(settings, target.net.config.vocab)
    settings = resolve(settings, target)
    run = begin("lantern", target, condition, settings, noise, seed)
    drafter = begin("lantern", draft, condition, replace(settings, cfg=settings.draft_cfg), noise, seed)
    drafter.report, drafter.tokens = run.report, run.tokens
    return (yield from timed(_cycles(run, drafter, settings, vq, k), run))


def _cycles(run: TokenRun, drafter: TokenRun, s: LanternSettings, vq: VQModel, k: int) -> TokenSampler:
    report, clock, device, count = run.report, run.clock, run.device, run.count
    batch, cells = torch.arange(len(run.tokens), device=device), torch.arange(count, device=device)
    fixed_at = torch.full((len(batch), count), -1, dtype=torch.int32, device=device)
    outcome = torch.full_like(fixed_at, PLAIN, dtype=torch.uint8)
    judged = torch.zeros(2, dtype=torch.int64, device=device)
    with torch.inference_mode():
        # The nearest neighbours of every code; the first k may be added to its probability.
        nearest = codebook_neighbours(vq.net.quantize, k + 1 if k else 0, device)[:, 1:]
        # Prefill both models, and draw the first token.
        with clock.phase("transformer"):
            hidden, cache = prefill(run, _guided(run), count)
        with clock.phase("draft"):
            draft_cache = prefill(drafter, _guided(drafter), count)[1]
        with clock.phase("sampling"):
            logits = guide(run, hidden, _guided(run))
            run.tokens[:, :1] = draw(logits, s, run.draws.gumbel("token", cells[:1], logits.shape[-1]))
            fixed_at[:, 0], run.decided[:, 0] = 0, True
    report.add(draft_passes=1)
    # Decided tokens of each image, and on the host the fewest and the most; passes of both models.
    known, least, most, done = torch.ones_like(batch), 1, 1, 2

    while least < count:
        yield run.step(done, max(done + 1, round(done * count / least)))
        with torch.inference_mode():  # closed before each yield, or it would apply to the driver's code
            # The draft ends at the last cell of the image with the fewest tokens; other images are padded behind their last cell.
            gamma, drafted = min(s.draft_length, count - least), list[Tensor]()
            # 1. The draft model draws gamma tokens one after another, from its distributions q [B, gamma, V].
            for j in range(gamma):
                with clock.phase("draft"):
                    # First also the token before the newest: it may be an accepted draft that was not fed yet.
                    logits = _feed(drafter, draft_cache, _behind(known, j - 1 if j else -2, j), most + j)[:, -1:]
                report.add(draft_passes=1)
                with clock.phase("sampling"):
                    at = (known + j).clamp(max=count)[:, None]
                    run.tokens.scatter_(1, at, draw(logits, s, run.draws.gumbel("draft", at, logits.shape[-1])))
                    drafted.append(_probabilities(logits, s))
            # 2. One pass of the target gives the distributions p [B, gamma, V] of these tokens and of the one behind them.
            with clock.phase("transformer"):
                logits = _feed(run, cache, _behind(known, -1, gamma), most + gamma)
            done += gamma + 1
            with clock.phase("sampling"):
                # 3. Tokens are accepted up to the first that fails the relaxed test.
                at = _behind(known, 0, gamma)
                x, inside, at = run.tokens.gather(1, at.clamp(max=count)), at < count, at.clamp(max=count)
                p, q, rest = _probabilities(logits[:, :-1], s), torch.cat(drafted, dim=1), logits[:, :-1]
                if s.temperature == 0:
                    passed = likeliest(p, x, nearest[:, :k], s.delta)
                else:
                    ratio, pooled = relaxed(p, x, nearest[:, :k], s.delta)
                    if s.drafts == CERTAIN:
                        rest = certain_rest(p, x, pooled, nearest).log()
                    else:
                        ratio = ratio / q.gather(-1, x[..., None])[..., 0]
                        rest = drafted_rest(p, q, x, pooled, nearest).log()
                    # A uniform number, from the Gumbel noise of a single value.
                    gumbel = run.draws.gumbel("accept", at, 1)[..., 0]
                    passed = gumbel.double().neg().exp().neg().exp() <= ratio
                accepted = (passed & inside).cumprod(1).sum(1)
                # 4. The next token: after a rejection from the residual distribution, which is tempered already.
                logits = torch.cat([rest, logits[:, -1:]], dim=1)[batch, accepted][:, None]
                end, whole = (known + accepted).clamp(max=count)[:, None], accepted == gamma
                gumbel = run.draws.gumbel("token", end, logits.shape[-1])
                new = draw(logits, s, gumbel)
                if s.temperature != 0:
                    new = torch.where(whole[:, None], new, (logits + gumbel).argmax(-1))
                run.tokens.scatter_(1, end, new)

                fresh, rejected = (cells >= known[:, None]) & (cells <= end), ~whole & (end[:, 0] < count)
                run.decided[:, :-1] |= fresh
                fixed_at.masked_fill_(fresh, done - 1)
                outcome.masked_fill_(fresh & (cells < end), ACCEPTED)
                outcome.masked_fill_((cells == end) & rejected[:, None], REJECTED)
                judged += torch.stack([accepted.sum(), rejected.sum()])
                known = (end[:, 0] + 1).clamp(max=count)
                least, most = (int(n) for n in torch.aminmax(known))  # the host waits here
    yield run.step(done, done)

    report.add(**dict(zip(("accepted", "rejected"), judged.tolist(), strict=True)))
    for name, value in (("step", fixed_at), ("outcome", outcome)):
        report.maps[name] = value.view(-1, run.grid, run.grid).cpu().numpy()
    return TokenSampled(run.codes(), report)


def _guided(run: TokenRun) -> bool:
    return any(run.guided(raster(run.grid)))


def _behind(known: Tensor, start: int, end: int) -> Tensor:
    """Cells known + start to known + end - 1 of every image, int64 [B, end - start]; they may lie outside the grid."""
    return known[:, None] + torch.arange(start, end, device=known.device)


def _feed(run: TokenRun, cache: Cache, cells: Tensor, end: int) -> Tensor:
    """Guided logits [B, m, V] of the cells behind ``cells`` int64 [B, m]; cells outside the grid are padding."""
    last, prefix, null = run.count - 1, cache.prefix, _guided(run)
    fed = torch.where((cells >= 0) & (cells < last), cells, last)
    position, end, mask = fed.clamp(max=last - 1), prefix + min(end, last), None
    if fed.numel() > 1:
        mask = torch.arange(end, device=fed.device) <= prefix + position[..., None]
    hidden = feed(run, cache, fed, position, fed + prefix, null, end, mask)
    interval = run.settings.cfg_interval
    return guide(run, hidden, cells <= interval if null and interval >= 0 else null)


def _probabilities(logits: Tensor, s: LanternSettings) -> Tensor:
    """Sampling distribution fp32 [..., V]; at temperature 0 without tempering, for the greedy acceptance test."""
    return (logits if s.temperature == 0 else tempered(logits, s)).softmax(-1)


LANTERN = Entry(
    "lantern", "LANTERN-style comparison", lantern, LanternSettings, (LLAMAGEN, TAR), needs_draft=True, needs_codes="vq"
)


def find(name: str) -> Entry:
    """The sampler of that name: this one, or one of the registry."""
    return LANTERN if name == LANTERN.name else registered(name)
