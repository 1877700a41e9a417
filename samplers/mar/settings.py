"""Settings of the MAR samplers; see ``samplers/settings.py`` for what a field carries."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, make_dataclass
from typing import Any, ClassVar

from torch import Tensor

from ...errors import UserError
from ...reports.record import Report
from ..annealing import Annealed
from ..settings import Guarantees, knob
from .schedule import ORDERS, PAPER, QUARTERS, in_stages, masked_after, staged_after, stages_of_cells

# If the last tokens take fewer than FEW_STEPS diffusion steps and a run does not set t_max, all tables start at t = 950
# or below, as in the authors' code: from 999 the first step multiplies the head's error by thousands (tables.py).
FEW_STEPS = 30
CLIPPED = 950

# In each field: first the default and the help sentence, then the range.
# fmt: off


@dataclass(frozen=True)
class MARBase(Guarantees):
    """Settings of all MAR samplers (Li et al. 2024)."""

    fewest_steps: ClassVar[int] = 1  # fewest AR steps that the other defaults allow

    # Settings that only some samplers have. All other samplers use these values.
    speculation = 0
    lookahead = 0

    steps: int = knob(64, "Number of AR steps (the steps in which the tokens of the image are decided); more is slower "
        "and finer. Usual: 64 "
        "for full-size models, 16 to 64 for the demo.", low=1, high=4096, step=1)
    diffusion_steps: int = knob(100, "Denoising steps for every token; more is slower and cleaner. Usual: 100; if you "
        "use fewer than 30, set t_max to 950.", low=1, high=1000, step=1)
    cfg: float = knob(3.0, "How closely the image follows the class or prompt; higher is more typical and less "
        "varied. Usual: 2.9 to 3.3; at 1, guidance is off, which halves the work.",
        low=1.0, high=20.0, step=0.1)
    cfg_schedule: str = knob("linear", "With linear, guidance increases from 1 to cfg while the tokens are decided, as "
        "in the paper. With constant, guidance is cfg from the start.", choices=("linear", "constant"), advanced=True)
    temperature: float = knob(1.0, "Amount of noise in every diffusion step; lower is smoother and less varied. "
        "Usual: 1.",
        low=0.0, high=2.0, step=0.01, advanced=True,
        more="The demo's file recommends 0.8.")
    order: str = knob("random", "Order in which the tokens are decided. Usual: random, a new order for every image, as "
        "in training; raster goes row by row, and halton spreads consecutive tokens evenly over the image.",
        choices=("random", "raster", "halton"),
        advanced=True,
        more="*raster* gives worse images than *random*.")
    t_max: int | None = knob(None, "Diffusion timestep from which denoising starts; a lower timestep has less noise. "
        "Usual: the model's own value, 999 or 950; 950 prevents coloured squares if you use few diffusion steps or "
        "half precision.",
        low=1, high=999, step=1, paper=999, advanced=True,
        more="The official models start at 999, and the demo starts at 950.")

    def streams(self) -> dict[str, int]:
        return {"full": self.diffusion_steps}

    @property
    def guides(self) -> bool:
        """Whether guidance is applied, for which the null branch is evaluated."""
        return self.cfg != 1

    @property
    def window(self) -> int:
        """Diffusion steps that are drafted at once; 1 if none are drafted, as at temperature 0, where steps have no
        noise.
        """
        return max(1, self.speculation) if self.temperature > 0 else 1

    @property
    def clips(self) -> bool:
        """Whether a run that does not set ``t_max`` starts at CLIPPED or below."""
        return False

    @property
    def verified_at_once(self) -> int:
        """AR steps whose tokens the diffusion head evaluates in one batch."""
        return 1

    @property
    def passes_at_once(self) -> int:
        """AR steps that the transformer evaluates in one batch, each with its own rows."""
        return 1

    def orders(self, random: Tensor) -> Tensor:
        """The images' orders, int64 [B, L], made from their random orders; the last position is decided first."""
        return ORDERS[self.order](random)

    def left(self, tokens: int, again: Tensor | None = None) -> list[int]:
        """Masked tokens left after each AR step, for an image of this many tokens.

        ``again``: in an edit, the tokens to decide, bool [B, L], the same number in every image. If an edit has fewer
        tokens than AR steps, it decides one token per step.

        Raises:
            UserError: more AR steps than tokens of a whole image.
        """
        if again is None:
            return masked_after(tokens, self.steps)

        masked = int(again[0].sum())
        return masked_after(masked, min(self.steps, masked))


@dataclass(frozen=True)
class DiSASettings(Annealed, MARBase):
    """Annealed diffusion steps (DiSA, arXiv 2505.20297): a part of other settings."""

    removed: ClassVar[Mapping[str, Any]] = {"diffusion_steps_curve": "linear"}

    diffusion_steps_end: int | None = knob(None, "Diffusion steps for the last tokens, which need fewer steps than the "
        "first tokens (DiSA); lower is faster. Usual: a tenth of diffusion_steps; if both numbers are equal, DiSA is "
        "off.",
        low=1, high=1000, step=1, paper=100, same_as="diffusion_steps", advanced=True,
        more="If this is below 30, set *t_max* to at most 950, as the authors' code does.")

    @property
    def clips(self) -> bool:
        last = self.diffusion_steps_end
        return last is not None and last < FEW_STEPS


@dataclass(frozen=True)
class SpeculationSettings(MARBase):
    """Speculation in the diffusion head: a part of other settings."""

    speculation: int = knob(0, "Draft this many diffusion steps at once and verify them in one call of the diffusion "
        "head; the image is a different one, sampled from exactly MAR's distribution. Usual: 8 on a GPU; at 0, nothing "
        "is drafted.",
        low=0, high=64, step=1, symbol="L",
        advanced=True,
        more="With a higher number, the diffusion head runs less often, but computes more at once, which is slower on "
            "a CPU.")

    @property
    def redraws(self) -> bool:
        return self.window > 1


@dataclass(frozen=True)
class MARSettings(SpeculationSettings, DiSASettings):
    """Plain MAR; MAR's own fields first, then DiSA's, then speculation."""


@dataclass(frozen=True)
class FastHybridSettings(DiSASettings):
    """FastHybrid (CVPR 2026): lookahead drafts, verification by similarity, guided few-step refinement."""

    removed: ClassVar[Mapping[str, Any]] = {"align_lookaheads": False}
    instead: ClassVar[Mapping[str, str]] = {
        "align_lookaheads": "the images of a batch advance independently, in fewer head calls",
    }

    lookahead: int = knob(8, "Draft the tokens of this many AR steps together; more is faster, but fewer drafts are "
        "accepted. Usual: 7 to 9 for 64 AR steps; at 0, nothing is drafted.", low=0, high=256, step=1, symbol="k",
        more="With a full-size model at 32 AR steps, use half as many; the presets for full-size models keep the "
            "ratio of *lookahead* to AR steps.")
    threshold: float = knob(0.8, "A draft is accepted if the cosine similarity of its condition and the token's actual "
        "condition is at least this; a higher value is slower and closer to MAR's image. Usual: 0.8 for full-size "
        "models, 0.9 to 0.99 for the demo; above 1, no draft is "
        "accepted.",
        low=-1.0, high=1.01, step=0.01, symbol="lambda",
        more="On the demo, the conditions change little from one AR step to the next, so the demo needs a higher "
            "threshold than full-size models.")
    guided_steps: int = knob(10, "Denoising steps for an accepted draft; more is slower and finer. Usual: 10.",
        low=1, high=1000, step=1, symbol="T_g")
    guidance_schedule: str = knob("cos", "How the influence of the draft changes over the guided steps: it decreases "
        "with cos, linear-down and square, and increases with linear-up; with none, the draft has no influence. Usual: "
        "cos, as in the paper.",
        choices=("cos", "linear-down", "linear-up", "square", "none"), advanced=True)
    accepted: str = knob("refine", "What happens to an accepted draft. Usual: refine, which improves the draft in a "
        "few guided steps; renoise adds noise to the draft and denoises it again, and keep leaves the draft as it is, "
        "so the run is faster, but textures show artefacts.",
        choices=("refine", "renoise", "keep"), advanced=True,
        more="With *renoise*, the draft influences only the start of the denoising. In the paper's comparison, "
            "*renoise* is a little worse than *refine*, and slower.")
    lookahead_start: int = knob(0, "Number of AR steps at the beginning without drafts; more is slower and closer to "
        "MAR's image. Usual: 0, as in the paper, or an eighth to a third of the AR steps.",
        low=0, high=4096, step=1, unit="AR steps",
        advanced=True,
        more="The first tokens determine what the image shows. If the first 8 of 32 AR steps have no drafts, the image "
            "usually differs little from MAR's image. At 0, as in the paper, the sampler is faster, but it often gives "
            "a clearly different image of the same subject.")
    denoise: float = knob(0.9, "Used only if 'accepted' is 'renoise'. Only this share of the guided steps is run, and "
        "the draft first gets as much noise as these steps remove; lower is faster and stays closer to the draft. "
        "Usual: 0.9, as in the paper.",
        low=0.0, high=1.0, step=0.01, advanced=True,
        more="The paper's comparison uses 15 guided steps for *renoise*.")

    def streams(self) -> dict[str, int]:
        guided = {"guided": self.guided_steps} if self.lookahead else {}
        return super().streams() | guided

    def no_gain(self, report: Report) -> str:
        if not self.approximates and self.window == 1:
            return (
                "Nothing was drafted, so MAR ran without acceleration: check lookahead, lookahead_start and threshold."
            )
        return super().no_gain(report)

    def reach(self, step: int) -> int:
        """AR steps of a lookahead that starts at AR step ``step``, itself included; 1 where nothing is drafted."""
        return self.lookahead if self.lookahead and step >= self.lookahead_start else 1

    @property
    def approximates(self) -> bool:
        # After the last AR step there is nothing to draft.
        drafts = self.lookahead > 1 and self.lookahead_start < self.steps - 1
        return (drafts and self.threshold <= 1) or super().approximates


@dataclass(frozen=True)
class GtRSettings(DiSASettings):
    """GtR (ICLR 2026): one colour of a checkerboard slowly, then the other in few AR steps.

    The first AR step and the tokens with most detail take ``diffusion_steps``, the reconstruction
    ``diffusion_steps_end``.
    """

    fewest_steps: ClassVar[int] = 4
    another_image: ClassVar[bool] = True  # the order is a checkerboard's

    steps: int = knob(17, "Number of AR steps (the steps in which the tokens of the image are decided), including "
        "reconstruction_steps; more is slower and finer. Usual: 17 for 256 tokens, as in the paper, and 6 to 9 for the "
        "demo.", low=1, high=4096, step=1)
    reconstruction_steps: int = knob(1, "Number of AR steps at the end, which decide the second colour of the "
        "checkerboard, half of all tokens; more is slower and finer. Usual: 1; the paper allows 1 or 2, and at 0, MAR "
        "runs without acceleration.",
        low=0, high=256, step=1, unit="AR steps",
        more="At 0, the order of the tokens and the number of tokens per AR step are the same as in MAR Sampler.")
    detail_share: float = knob(0.1, "Share of the tokens of each AR step that get all diffusion_steps, because they "
        "have most detail; the other tokens get fewer steps, and a higher share is slower and finer. Usual: 0.1; at 0, "
        "all tokens of an AR step get the same number of steps.",
        low=0.0, high=1.0, step=0.01,
        more="How much detail a token has is estimated from the transformer's output for it: the more energy in high "
            "frequencies, the more detail. The number of tokens is rounded down: with a share of 0.1, it is one of ten "
            "tokens, but none of nine. The setting has no effect if *diffusion_steps_end* equals *diffusion_steps*.")
    first_share: float = knob(0.75, "Share of the AR steps before the reconstruction that the first stage takes (see "
        "stages); a higher share spends more steps on the layout and fewer on the other stages. Usual: 0.75, which is "
        "12 of 16.",
        low=0.01, high=0.99, step=0.01, advanced=True,
        more="The second stage takes the same share of the remaining steps, which is 3 of 4. If *stages* is "
            "*quarters*, *first_share* is a share of all AR steps.")
    stages: str = knob(PAPER, "The tokens before the reconstruction are decided in stages: with paper, three stages of "
        "1/8, 1/8 and 1/4 of all tokens; with quarters, two stages of 1/4. Usual: paper; quarters is for workflows "
        "that were saved before this setting existed.",
        choices=(PAPER, QUARTERS), advanced=True,
        more="*quarters* was our misreading of the paper. It needs about twice as many AR steps as *paper*, 32 for 256 "
            "tokens.")

    @property
    def stage_steps(self) -> tuple[int, ...]:
        """AR steps of the stages, the reconstruction last.

        Raises:
            UserError: the reconstruction leaves fewer than one AR step for each other stage.
        """
        last = self.reconstruction_steps
        before = 3 if self.stages == PAPER else 2
        if self.steps < last + before:
            raise UserError(
                f"reconstruction_steps: the reconstruction takes {last} of {self.steps} AR steps and leaves "
                f"{max(0, self.steps - last)} for the first half of the tokens, which needs at least {before}; use at "
                f"least {last + before} steps, or lower reconstruction_steps."
            )

        def share_of(steps: int, most: int) -> int:
            return min(max(1, round(self.first_share * steps)), most)

        left = self.steps - last
        if self.stages == QUARTERS:
            first = share_of(self.steps, most=left - 1)
            return first, left - first, last

        first = share_of(left, most=left - 2)
        left -= first
        second = share_of(left, most=left - 1)
        return first, second, left - second, last

    def stage_sizes(self, grid: int, again: Tensor | None = None) -> tuple[int, ...]:
        """Tokens of the stages, the reconstruction last, counted on the grid; see :meth:`left`.

        Raises:
            UserError: an edit whose images have stages of different sizes.
        """
        stages = stages_of_cells(grid, self.stages)
        count = 4 if self.stages == PAPER else 3
        if again is None:
            return tuple(stages.bincount(minlength=count).tolist())

        sizes = [stages[cells].bincount(minlength=count).tolist() for cells in again.cpu()]
        if any(of_image != sizes[0] for of_image in sizes):
            raise UserError(
                "mask: in one of GtR's stages, the masks of the batch cover different numbers of tokens; use one mask "
                "for the batch, or run the images separately."
            )
        return tuple(sizes[0])

    def orders(self, random: Tensor) -> Tensor:
        orders = super().orders(random)
        if not self.reconstruction_steps:
            return orders

        grid = math.isqrt(random.shape[1])
        return in_stages(orders, stages_of_cells(grid, self.stages))

    def left(self, tokens: int, again: Tensor | None = None) -> list[int]:
        """See :meth:`MARBase.left`. In an edit, a stage with fewer tokens than AR steps decides one token per step.

        Raises:
            UserError: more AR steps than tokens, in a whole image or in one of its stages; too few for the stages; an
                edit whose images have stages of different sizes.
        """
        if not self.reconstruction_steps:
            return super().left(tokens, again)

        names = ("first", "second", "third")[: len(self.stage_steps) - 1]
        sizes = self.stage_sizes(math.isqrt(tokens), again)
        for name, size, steps in zip((*names, "last"), sizes, self.stage_steps, strict=True):
            if steps > size and again is None:
                remedy = "reconstruction_steps" if name == "last" else "steps, or change first_share"
                raise UserError(
                    f"steps: GtR's {name} stage has {steps} AR steps for {size} tokens; lower {remedy}."
                )
        return staged_after(sizes, self.stage_steps)

    @property
    def approximates(self) -> bool:
        return self.reconstruction_steps > 0 or super().approximates


# Diffusion steps from one full evaluation of the head to the next, of 100, as in LazyMAR's published code.
HEAD_PERIOD = 7


@dataclass(frozen=True)
class CacheSettings(Guarantees):
    """LazyMAR (ICCV 2025): which features are kept from one AR step to the next, and for how long."""

    # ``block`` set which decoder block measures how much a token changed; now it is usual_block in lazy/plan.py.
    removed: ClassVar[Mapping[str, Any]] = {"block": None, "head_period": HEAD_PERIOD}
    # In a class from with_cache_settings: the class of the sampler's own settings.
    beside_caches: ClassVar[type[MARBase] | None] = None

    refresh_period: int = knob(9, "Number of AR steps from one full computation to the next; a higher number is faster "
        "and less exact. Usual: 9 for 64 AR steps, and 5 for 32; at 1, nothing is cached.", low=1, high=4096, step=1,
        symbol="tau",
        unit="AR steps")
    start_step: int = knob(5, "Number of AR steps at the beginning in which nothing of the transformer is reused, "
        "because these steps determine the content; a higher number is slower and more exact. Usual: 5 for 64 AR "
        "steps, and 4 for 32.",
        low=0, high=4096, step=1, unit="AR steps",
        more="The cache of the diffusion head (*head_cache*) works from the first AR step on.")
    computed_ratio: float = knob(0.05, "Smallest share of the tokens that the transformer's decoder computes at an AR "
        "step between two full computations; lower is faster and less exact. Usual: 0.05; at 1, all tokens are "
        "computed.",
        low=0.0, high=1.0, step=0.01,
        more="The share falls from 1 to this value; *ratio_schedule* sets how soon.")
    ratio_schedule: str = knob("published", "How computed_ratio is reached: published follows the authors' table, in "
        "which the decoder computes all tokens in the first 20 AR steps, then fewer, and only the share computed_ratio "
        "from step 41 on. stretched spreads this table over all AR steps, which is faster and less exact with fewer "
        "than 64 AR steps; constant uses computed_ratio from the start.",
        choices=("published", "stretched", "constant"), advanced=True,
        more="\n  - *published*: all tokens in AR steps 1 to 20, then shares of 0.6, 0.5, 0.4, 0.15 and 0.12, and "
            "*computed_ratio* from step 41 on. The authors' table ends at step 64; after that, *computed_ratio* still "
            "applies. With 20 AR steps or fewer, the token cache skips nothing.\n  - *stretched*: with 32 AR "
            "steps, MAR-H takes 10% fewer operations than with *published*. With 64 AR steps, both are the same.\n  "
            "- *constant*: *computed_ratio* at every step, as in the paper's Figure 6.")
    selection: str = knob("least-similar", "Which tokens the decoder computes, in addition to the tokens of this AR "
        "step and of the previous one. Usual: least-similar, the tokens that changed most, as in the paper; the other "
        "choices are the alternatives that the paper tested against it.",
        choices=("least-similar", "most-similar", "random", "undecided", "decided"), advanced=True,
        more="In the paper (Table 3), the alternatives gave worse images: *most-similar* (IV), *random* (III), "
            "*undecided* (II) and *decided* (I). The paper names a strategy after the tokens that are cached; our "
            "names say which tokens are computed. *undecided* and *decided* ignore *computed_ratio*: they compute all "
            "tokens of that kind, but not the rows that hold the class.")
    condition_cache: bool = knob(True, "Reuse the difference that guidance needs between two full computations, which "
        "halves the transformer's work. Without this cache, runs are slower and more exact.", advanced=True,
        more="Guidance compares the unconditional prediction with the prediction for the label or prompt. Between "
            "two full computations, only the prediction for the label or prompt is computed. The difference between "
            "the two predictions is taken from the last full computation. The cache has no effect at *cfg* 1.")
    token_cache: bool = knob(True, "Do not compute tokens that hardly change; their cached values are used instead. "
        "Without this cache, runs are slower and more exact.", advanced=True)
    head_cache: bool = knob(True, "Reuse most of the diffusion head's results from one diffusion step to the next, as "
        "the published code does. Without this cache, runs are slower and more exact.", advanced=True,
        more="The paper does not describe this cache, but the paper's speed-ups include it.")
    encoder_cache: bool = knob(True, "Reuse the encoder's results for the tokens that were decided earlier, as the "
        "published code does. Without this cache, runs are slower and more exact.",
        advanced=True,
        more="The cache holds the keys and values of the encoder's attention layers, and for Harmon and UniPic also "
            "those of the language model. The paper does not mention this cache.")

    @property
    def approximates(self) -> bool:
        caches = self.condition_cache or self.token_cache or self.head_cache or self.encoder_cache
        return (self.refresh_period > 1 and caches) or super().approximates

    def no_gain(self, report: Report) -> str:
        """The sampler's own reasons come first."""
        unused = "" if self._cached(report) else "Nothing came from the caches: every AR step was computed in full."
        return super().no_gain(report) or unused

    def _cached(self, report: Report) -> bool:
        """Whether a run used one of the caches, the transformer's or the diffusion head's."""
        if self.refresh_period == 1:
            return False

        # An AR step reuses something from start_step + 1 on, if anything is kept.
        run = report.settings
        reaches = self.start_step + 1 < run.get("steps", 1 << 16)
        tokens = bool(report.counts.get("cached_tokens"))
        condition = self.condition_cache and run.get("cfg", 0.0) != 1
        transformer = reaches and (tokens or condition or self.encoder_cache)

        # The head's cache is used at every AR step.
        return transformer or head_period(self, run.get("diffusion_steps", 100)) > 1


def head_period(settings: CacheSettings, steps: int) -> int:
    """Diffusion steps from one full evaluation of the head to the next; 1 if every step is evaluated in full. The
    period is proportional to the number of diffusion steps, ``steps``, because the error depends on their ratio.
    """
    if settings.refresh_period == 1 or not settings.head_cache:
        return 1
    return math.ceil(HEAD_PERIOD * steps / 100)


@dataclass(frozen=True)
class LazyMARSettings(SpeculationSettings, CacheSettings, DiSASettings):
    """Plain MAR with LazyMAR's caches; MAR's fields come first, speculation last."""


@dataclass(frozen=True)
class CSpDSettings(MARBase):
    """CSpD (arXiv 2411.11925): a small MAR drafts, the large one verifies."""

    removed: ClassVar[Mapping[str, Any]] = {"inner_temperature": 42.0}

    draft_length: int = knob(8, "Number of AR steps that are drafted before the target verifies the drafts; with a "
        "higher number, the target runs less often, but more drafts are rejected. Usual: a sixteenth to an eighth of "
        "the AR steps.",
        low=1, high=256, step=1, symbol="gamma", unit="AR steps",
        more="The paper drafts 4 to 32 of 256 AR steps.")
    prefill_ratio: float = knob(0.15, "Share of the AR steps that the target computes alone, at the beginning; higher "
        "is slower and closer to the target's image. Usual: 0.05 to 0.15; at 1, nothing is drafted.",
        low=0.0, high=1.0, step=0.01,
        more="In the first AR steps, the drafts are worst.")
    mode: str = knob("published", "How drafts are accepted: published is the rule of the authors' code, which accepts "
        "most drafts and is approximate; paper is the stricter rule of the paper, which hardly ever accepts a draft. "
        "lossless keeps the distribution of the target's images exactly.",
        choices=("published", "paper", "lossless"),
        more="The notes of this help page compare the three modes.")
    alignment: bool = knob(True, "Used only if 'mode' is 'published': both models use the same noise for every token, "
        "so that draft and target agree more often. When this is off, more drafts are rejected.", advanced=True,
        more="The paper calls this setting *trajectory alignment*. In the modes *paper* and *lossless*, both models "
            "always use the same noise.")
    speculation: int = knob(0, "Used only if 'mode' is 'lossless': the target drafts this many of its own diffusion "
        "steps and verifies them in one call, which does not change the distribution. Usual: 8; at 0, the target "
        "does not draft.",
        low=0, high=64, step=1, symbol="L", advanced=True,
        more="With a higher number, the diffusion head runs less often, but computes more at once, which is slower on "
            "a CPU.")

    @property
    def verified_at_once(self) -> int:
        return self.draft_length + (self.mode == "paper")  # in mode paper, also the next one

    @property
    def passes_at_once(self) -> int:
        # In mode published, one pass of the target verifies all drafts, given the tokens of the last verification.
        return 1 if self.mode == "published" else self.verified_at_once

    def streams(self) -> dict[str, int]:
        unaligned = self.mode == "published" and not self.alignment
        of_target = {"target": self.diffusion_steps} if unaligned else {}
        return super().streams() | of_target

    def prefill(self, steps: int) -> int:
        """How many of S = ``steps`` AR steps the target takes alone at first: the AR steps 0 to
        floor(S prefill_ratio), as in the published code.
        """
        return min(steps, int(steps * self.prefill_ratio) + 1)

    @property
    def all_are_prefill(self) -> bool:
        """Whether the target computes every AR step alone."""
        return self.prefill(self.steps) == self.steps

    @property
    def approximates(self) -> bool:
        return not (self.mode == "lossless" or self.all_are_prefill) or super().approximates

    def no_gain(self, report: Report) -> str:
        if self.all_are_prefill and self.window == 1 and not self.approximates:
            return "Nothing was drafted, so MAR ran without acceleration: prefill_ratio covers all AR steps; lower it."
        return super().no_gain(report)

    @property
    def redraws(self) -> bool:
        return not self.all_are_prefill or self.window > 1


def with_cache_settings(kind: type[MARBase]) -> type[MARBase]:
    """Settings of a sampler of class ``kind``, joined with the settings of LazyMAR's caches: the sampler's fields come
    first.
    """
    about = {
        "__doc__": f"{kind.__name__} with the settings of LazyMAR's caches.",
        "__module__": __name__,
        "beside_caches": kind,
    }
    name = kind.__name__.removesuffix("Settings") + "LazyMARSettings"
    return make_dataclass(name, [], bases=(CacheSettings, kind), namespace=about, frozen=True)
