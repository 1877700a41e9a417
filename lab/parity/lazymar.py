"""Parity cases of LazyMAR: refreshed steps, similarities, selected rows, conditions, and sampling runs.

Equal rows tie exactly at the selection boundary, where the choice of the reference depends
on its sort. The recorded rows must have the same scores as ours, and the run continues
with them. The shares of computed rows are the sampler's own, those of *published*, and a wrong one gives another number
of rows. The guidance scale and the constants of the published code are not recorded.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from ...samplers import diffusion_steps
from ...samplers.conditioning import from_ids
from ...samplers.engine import run_passes
from ...samplers.mar.canvas import MARCanvas
from ...samplers.mar.lazy import LazyTransformer
from ...samplers.mar.lazy import transformer as lazy_transformer
from ...samplers.mar.lazy.settings import LazyMARSettings
from ...samplers.mar.lazy.transformer import RowChoice, similarity
from ...samplers.mar.mar import Diffusion
from ...samplers.mar.prepare import mar_canvas
from ...samplers.mar.tables import respacing_at
from ...samplers.noise import PairedNoise
from .cases import Case, Check, exact, masked_model, read_tensors

DATA, MODEL = "lazymar.safetensors", "lazy_tiny_mar_f16.safetensors"
CFG, HIGHEST = 3.0, 950
# Constants of the published code: block 4, and 15 rows in addition to the required ones.
BLOCK, SPARE = 4, 15
SCORE_TOLERANCE = 1e-5
BASELINE, TOKENS = "baseline", "tokcache"


class _RecordedSelection(LazyTransformer):
    """LazyMAR with the recorded selection; it stores conditions, scores and its own selection."""

    def __init__(self, canvas: MARCanvas, settings: LazyMARSettings, recorded: dict[int, Tensor]):
        with mock.patch.object(lazy_transformer, "measuring_block", lambda depth: BLOCK):
            super().__init__(canvas, settings)
        self.row_selection.spare = SPARE
        self.row_selection.choice = partial(self.recorded_choice, self.row_selection.choice)  # type: ignore[method-assign, assignment]
        self.recorded = recorded
        self.z: list[tuple[Tensor, Tensor]] = []
        self.fresh: list[int] = []
        self.scores: dict[int, Tensor] = {}
        self.choices: dict[int, tuple[Tensor, Tensor]] = {}
        """By AR step: rows that must be computed, and all rows of our own selection, int64 [B, n]."""

    def __call__(self, step: int, wanted: Tensor) -> Tensor:
        self.z.append((wanted, super().__call__(step, wanted)))
        return self.z[-1][1]

    def refresh_features(self, step: int, wanted: Tensor) -> Tensor:
        self.fresh.append(step)
        return super().refresh_features(step, wanted)

    def recorded_choice(
        self, rows: Callable[..., RowChoice | None], step: int, known: int, required: Tensor
    ) -> Callable[[Tensor, Tensor], Tensor] | None:
        """The choice of the recorded rows, in place of the one that ``rows`` makes."""
        own = rows(step, known, required)
        return None if own is None else partial(self.choose, own, step)

    def choose(self, own: RowChoice, step: int, values: Tensor, last: Tensor) -> Tensor:
        self.scores[step] = similarity(values, last)
        keep = own(values, last)
        if step not in self.recorded:
            return keep
        self.choices[step] = own.required, keep
        rest = self.recorded[step].scatter(1, own.required, False)
        return torch.cat([own.required, rest.nonzero()[:, 1].view(len(own.required), -1)], dim=1)


def cases(folder: Path, config: str, recorded: Callable[[dict[str, Tensor], str, bool], PairedNoise]) -> Iterator[Case]:
    """The cases of a folder; ``recorded`` makes the noise of a tag from tensors named as in the cases of MAR."""
    data = read_tensors(folder / DATA)
    steps = next(value for key, value in data.items() if key.endswith(".step_noise_cat_f16"))

    @lru_cache(maxsize=3)
    def run(tag: str) -> tuple[Tensor, _RecordedSelection]:
        model = masked_model(folder / MODEL, folder / config)
        of = TOKENS if tag == BASELINE else tag  # the baseline has the same noise

        # The noise of the null branch, which the reference draws and discards, may be omitted.
        own = {name: data[f"{of}.{name}"] for name in ("orders", "n_pred")}
        own |= {"init_noise_cat": data[f"{of}.init_noise_cat_f16"], "step_noise_cat_f16": steps}
        both = steps.shape[1] > len(own["init_noise_cat"])
        noise = recorded({f"x.{name}": value for name, value in own.items()}, "x", both)
        fresh = [] if tag == BASELINE else data[f"{of}.force_fresh"].nonzero()[:, 0].tolist()

        # Refreshed up to the start step, then once per period.
        start = next((k for k, s in enumerate(fresh) if s + 1 not in fresh), 0)
        later = [s for s in fresh if s > start]
        period = later[0] - start if later else 4096 if fresh else 1
        of_steps = {"steps": len(data[f"{of}.n_pred"]), "diffusion_steps": len(steps), "cfg": CFG, "t_max": HIGHEST}
        caches = {"start_step": start, "refresh_period": period}
        settings = LazyMARSettings(**of_steps, **caches, head_cache=tag not in (BASELINE, TOKENS))
        kept = {}
        if tag != BASELINE:
            masks = data[f"{of}.prune_keep_mask"].bool()
            kept = dict(zip(data[f"{of}.prune_step"].tolist(), masks, strict=True))

        canvas = mar_canvas("mar", model, from_ids(data[f"{of}.labels"].tolist()), settings, noise, None)
        look = _RecordedSelection(canvas, settings, kept)

        # The recorded timesteps are not a respacing.
        respaced = respacing_at(tuple(round(HIGHEST * i / (len(steps) - 1)) for i in range(len(steps))))
        table = diffusion_steps.step_table(respaced.without_last_noise, canvas.time_embeddings(respaced))
        for _ in run_passes(
            canvas, canvas.order.plan, look, Diffusion(canvas, look.heads, [table] * canvas.order.steps)
        ):
            pass

        return canvas.to_latents(canvas.values), look

    def chosen(tag: str) -> Iterator[Check]:
        _, computed = run(tag)
        yield exact(torch.tensor(computed.fresh), data[f"{tag}.force_fresh"].nonzero()[:, 0])
        at = {step: k for k, step in enumerate(data[f"{tag}.prune_step"].tolist())}
        for step, score in computed.scores.items():
            yield Check(score, data[f"{tag}.prune_vcos"][at[step]], SCORE_TOLERANCE)

        for step, (required, keep) in computed.choices.items():
            theirs = data[f"{tag}.prune_keep_mask"][at[step]].bool()
            ours = torch.zeros_like(theirs).scatter(1, keep, True)
            yield exact(theirs.gather(1, required), torch.ones_like(required))
            yield exact(theirs.sum(1), ours.sum(1))
            scores = (computed.scores[step].where(mask, torch.inf).sort(1).values for mask in (ours, theirs))
            lowest = [values[:, : keep.shape[1]] for values in scores]
            yield Check(lowest[0], lowest[1], SCORE_TOLERANCE)

    def conditions(tag: str) -> Iterator[Check]:
        expected, row = data[f"{tag}.z_cat"], 0
        for wanted, z in run(tag)[1].z:
            order, both = wanted.argsort(1).repeat(2, 1), z.flatten(0, 1)
            both = both.gather(1, order[..., None].expand_as(both)).flatten(0, 1)
            yield Check(both, expected[row : row + len(both)])
            row += len(both)

    def whole(tag: str) -> Iterator[Check]:
        yield Check(run(tag)[0], data[f"{tag}.out"])

    for tag in sorted({key.split(".")[0] for key in data}):
        if tag != BASELINE:
            yield Case(f"mar/lazymar.{tag}.chosen", partial(chosen, tag))
            yield Case(f"mar/lazymar.{tag}.conditions", partial(conditions, tag))
        yield Case(f"mar/lazymar.{tag}.run", partial(whole, tag))
