"""Parity cases of CSpD's published mode: acceptance ratio, replacement of rejected drafts, and sampling runs.

Class labels, prefill ratio and guidance scale are not recorded; the constants hold them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from ...networks.mar import Conditioning, MARModel
from ...reports.record import Report
from ...samplers.conditioning import from_ids
from ...samplers.engine import finish
from ...samplers.mar.canvas import MARCanvas, TokenIndex
from ...samplers.mar.cspd import make_prefill_diffusion, speculate
from ...samplers.mar.cspd.mode import MARDrafter, PathDensity
from ...samplers.mar.cspd.rejection import (
    MAX_PROPOSALS,
    PUBLISHED_RULE,
    Published,
    Rejection,
    RejectionNoise,
    acceptance_of_proposals,
    log_ratio,
)
from ...samplers.mar.cspd.settings import CSpDSettings
from ...samplers.mar.prepare import mar_canvas
from ...samplers.mar.schedule import masked_after
from ...samplers.mar.tables import Respacing, respacing_at
from ...samplers.mar.transformer import FullTransformer
from ...samplers.noise import PairedNoise
from .cases import Case, Check, exact, masked_model, read_tensors

DATA, DRAFT = "cspd.safetensors", "cspd_draft_f16.safetensors"
LABELS, PREFILL, CFG, HIGHEST = (1, 9), 0.15, 3.0, 950


@dataclass(eq=False)
class _RecordedCanvas(MARCanvas):
    """A canvas with the recorded timesteps, which are not a respacing."""

    recorded: Respacing = field(kw_only=True)

    def respaced_diffusion(self, count: int) -> Respacing:
        return self.recorded

    def with_model(self, model: MARModel, conditioning: Conditioning, report: Report) -> MARCanvas:
        return _recorded(super().with_model(model, conditioning, report), self.recorded)


def _recorded(canvas: MARCanvas, table: Respacing) -> _RecordedCanvas:
    """A canvas with the recorded timesteps ``table`` instead of its own."""
    own = {f.name: getattr(canvas, f.name) for f in fields(canvas) if f.init}
    return _RecordedCanvas(**own, recorded=table)


class _Verification:
    """Rows of one recorded verification, image by image, positions ascending."""

    def __init__(self, data: dict[str, Tensor], tag: str, rows: slice):
        def cat(name: str) -> Tensor:
            return data[f"{tag}.verify_{name}_cat"][rows]

        self.q = PathDensity(cat("mq"), cat("sq").log(), cat("lq"))
        self.p = PathDensity(cat("mp"), cat("sp").log(), cat("lp"))
        self.token, self.ratio, self.guess, self.out = (cat(name) for name in ("x", "prob", "guess", "out"))
        self.normals: list[Tensor] = []
        self.uniforms: list[Tensor] = []

    @property
    def accepted(self) -> Tensor:
        return self.ratio > self.guess

    def decide(self, flat: Iterator[Tensor], normals: Iterator[Tensor]) -> Tensor:
        """Resulting tokens; consumes recorded draws until all are decided."""
        out, left = torch.where(self.accepted[:, None], self.token, 0), ~self.accepted
        while bool(left.any()) and len(self.normals) < MAX_PROPOSALS:
            self.normals.append(next(normals))
            self.uniforms.append(next(flat))
            drawn = self.p.mean + self.p.log_std.exp() * self.normals[-1]
            hit = left & (
                acceptance_of_proposals(drawn, self.q, self.p, PUBLISHED_RULE.sigma_power) > self.uniforms[-1]
            )
            out, left = torch.where(hit[:, None], drawn, out), left & ~hit

        return out


def _verifications(data: dict[str, Tensor], tag: str) -> list[_Verification]:
    """The recorded verifications."""
    ends = torch.tensor([0, *data[f"{tag}.verify_rows"].tolist()]).cumsum(0).tolist()
    return [_Verification(data, tag, slice(start, end)) for start, end in pairwise(ends)]


def _decided(data: dict[str, Tensor], tag: str) -> tuple[list[_Verification], list[Tensor]]:
    """The recorded verifications with their draws, and the tokens computed from them."""
    uniforms = iter(data[f"{tag}.rand_flat"].split(data[f"{tag}.rand_sizes"].tolist()))
    channels = data[f"{tag}.noise_f16"].shape[2]
    rows = data[f"{tag}.randn_like_rows"].tolist()
    normals = iter(data[f"{tag}.randn_like_flat_f16"].view(-1, channels).split(rows))
    found, ours = _verifications(data, tag), []

    for v in found:
        next(uniforms)  # the uniform draws of the acceptance test, which are stored with the rows too
        ours.append(v.decide(uniforms, normals))

    return found, ours


class _RecordedRejectionNoise(RejectionNoise):
    """Recorded rejection draws by image and position."""

    def __init__(self, tokens: int, places: list[tuple[Tensor, Tensor]], found: list[_Verification]):
        self.where = torch.zeros(2, tokens, dtype=torch.int64)  # row in the concatenated verifications
        self.which = torch.zeros(2, tokens, dtype=torch.int64)
        self.found, at = found, 0
        self.guesses = torch.cat([v.guess for v in found])
        for k, (image, position) in enumerate(places):
            self.where[image, position] = at + torch.arange(len(image))
            self.which[image, position] = k
            at += len(image)

    def acceptance(self, tokens: TokenIndex) -> Tensor:
        return self.guesses[self.where[tokens.index]]

    def proposals(self, tokens: TokenIndex, first: int, count: int, channels: int) -> tuple[Tensor, Tensor]:
        k = int(self.which[tokens.index][0])
        row = self.where[tokens.index] - sum(len(v.guess) for v in self.found[:k])
        # Beyond the recorded draws none may be kept.
        normals, uniforms = torch.zeros(len(row), count, channels), torch.full((len(row), count), torch.inf)
        known = range(first, min(first + count, len(self.found[k].normals)))
        for i, attempt in enumerate(known):
            normals[:, i], uniforms[:, i] = self.found[k].normals[attempt][row], self.found[k].uniforms[attempt][row]
        return normals, uniforms


class _RecordedNoise(PairedNoise):
    """Recorded noise: initial by position, and by position and timestep."""

    def __init__(self, data: dict[str, Tensor], tag: str, inter: str):
        self._orders, self._first = data[f"{tag}.orders"].long(), data[f"{tag}.noise_f16"]
        self.images = tuple(range(len(self._orders)))
        self._steps = data[f"{inter}.inter_noise_f16"].flip(2).transpose(1, 2)

    def orders(self, tokens: int) -> Tensor:
        return self._orders

    def start_noise(self, stream: str, tokens: int, channels: int) -> Tensor:
        return self._first if stream == "full" else torch.zeros(len(self._first), tokens, channels)

    def step_noise(self, stream: str, count: int, tokens: int, channels: int) -> Tensor:
        return self._steps


def _schedule(tokens: int, rows: list[int], images: int) -> tuple[int, int]:
    """AR steps and draft length whose verifications have the recorded numbers of rows."""
    for steps in range(1, tokens + 1):
        ends = [tokens - left for left in masked_after(tokens, steps)]
        first = int(steps * PREFILL) + 1
        for length in range(1, steps + 1):
            marks = [s for s in range(first, steps) if s % length == 0 or s + 1 == steps]
            bounds = [ends[first - 1], *(ends[s] for s in marks)] if first < steps else []
            if [images * (b - a) for a, b in pairwise(bounds)] == rows:
                return steps, length

    raise ValueError("no number of AR steps and drafts has verifications of the recorded sizes")


@lru_cache(maxsize=2)
def _models(folder: Path, target: str, config: str) -> tuple[MARModel, MARModel]:
    return masked_model(folder / target, folder / config), masked_model(folder / DRAFT, folder / config)


def cases(folder: Path, target: str, config: str) -> Iterator[Case]:
    """The cases of a folder; ``target`` and ``config`` are the target's file and its JSON."""
    data = read_tensors(folder / DATA)
    inter = next(key.split(".")[0] for key in data if key.endswith(".inter_noise_f16"))

    def ratio(tag: str, inner: float) -> Iterator[Check]:
        rule = PUBLISHED_RULE._replace(draft_std_factor=inner)
        for v in _verifications(data, tag):
            # As probabilities: values above 1 are equivalent.
            yield Check(log_ratio(v.token, v.q, v.p, *rule).exp().clamp(max=1), v.ratio.clamp(max=1))

    def again(tag: str) -> Iterator[Check]:
        found, ours = _decided(data, tag)
        for v, out in zip(found, ours, strict=True):
            yield Check(out, v.out)

    def whole(tag: str, inner: float) -> Iterator[Check]:
        model, draft = _models(folder, target, config)
        found, _ = _decided(data, tag)
        steps, tokens = data[f"{inter}.inter_noise_f16"].shape[2], model.net.config.tokens
        table = respacing_at(tuple(round(HIGHEST * i / (steps - 1)) for i in range(steps)))
        ar_steps, length = _schedule(tokens, [len(v.guess) for v in found], len(LABELS))
        steps_of = {"steps": ar_steps, "diffusion_steps": steps, "draft_length": length, "prefill_ratio": PREFILL}
        settings = CSpDSettings(**steps_of, cfg=CFG, mode="published")
        condition = from_ids(LABELS)
        made = mar_canvas("cspd", model, condition, settings, _RecordedNoise(data, tag, inter), None)
        canvas = _recorded(made, table)
        places, first = [], settings.prefill(ar_steps)

        for step in range(first, ar_steps):
            if step % length == 0 or step + 1 == ar_steps:
                where = canvas.order.positions_from(first, step + 1 - first).sort(1).values
                places.append((torch.arange(len(where)).repeat_interleave(where.shape[1]), where.flatten()))
                first = step + 1

        drafter = MARDrafter(canvas, draft, condition, FullTransformer, adds_last_noise=False)
        transformer = FullTransformer(canvas)
        prefill_diffusion = make_prefill_diffusion(canvas, transformer)
        mode = Published(canvas, transformer, drafter, prefill_diffusion.noise)
        rule = PUBLISHED_RULE._replace(draft_std_factor=inner)
        mode.rejection = Rejection(rule, _RecordedRejectionNoise(tokens, places, found))
        with torch.no_grad():
            result = finish(speculate(prefill_diffusion, mode))

        for v, (image, position) in zip(found, places, strict=True):
            grid = torch.from_numpy(result.report.maps["outcome"]).view(len(LABELS), -1)
            yield exact(grid[image, position] == 1, v.accepted)

        yield Check(result.latents, data[f"{tag}.out"])

    for tag in sorted({key.split(".")[0] for key in data}):
        inner = float(tag.removeprefix("t"))
        yield Case(f"mar/cspd.{tag}.ratio", partial(ratio, tag, inner))
        yield Case(f"mar/cspd.{tag}.again", partial(again, tag))
        yield Case(f"mar/cspd.{tag}.run", partial(whole, tag, inner))
