"""Settings of the MAR samplers; see ``samplers/settings.py`` for what a field carries."""

from __future__ import annotations

from dataclasses import dataclass

from ..settings import Guarantees, knob

# A field is its default and sentence, then its range.
# fmt: off


@dataclass(frozen=True)
class MARBase(Guarantees):
    """Settings of all MAR samplers (Li et al. 2024)."""

    steps: int = knob(64, "How many AR steps decide the image's tokens; more is slower and finer. Usual: 64 for "
        "full-size models, 16 to 64 for the demo; never more than the image has tokens.", low=1, high=4096, step=1,
        symbol="num_iter")
    diffusion_steps: int = knob(100, "Denoising steps of every token; more is slower and cleaner. Usual: 100. Below "
        "about 30 use t_max 950.", low=1, high=1000, step=1, symbol="T")
    cfg: float = knob(3.0, "Guidance towards the class; higher is more typical and less varied. Usual: 2.9 to 3.3. At "
        "1 there is no guidance and half the work.", low=1.0, high=20.0, step=0.1, symbol="cfg scale")
    cfg_schedule: str = knob("linear", "linear: guidance grows from 1 to cfg as tokens are decided (the paper's); "
        "constant: cfg from the start.", choices=("linear", "constant"), advanced=True)
    temperature: float = knob(1.0, "Scale of the noise added at every diffusion step; lower is smoother and less "
        "varied. Usual: 1.",
        low=0.0, high=2.0, step=0.01, symbol="temperature", advanced=True)
    order: str = knob("random", "The order in which tokens are decided. random: a new one for every image (what MAR "
        "was trained on); raster: row by row; halton: evenly spread.", choices=("random", "raster", "halton"),
        advanced=True)
    t_max: int | None = knob(None, "Highest diffusion timestep; lower starts from less noise. Usual: the checkpoint's "
        "own, 999 officially and 950 for the demo. With few steps or half precision from 999 single patches diverge; "
        "950 prevents it.", low=1, high=999, step=1, paper=999, advanced=True)


@dataclass(frozen=True)
class DiSASettings(MARBase):
    """Annealed diffusion steps (DiSA, arXiv 2505.20297): a part of other settings."""

    diffusion_steps_end: int | None = knob(None, "Diffusion steps of the last tokens: later tokens are more certain "
        "and need fewer (DiSA). Lower is faster. Usual: a tenth of diffusion_steps, with t_max 950. At diffusion_steps "
        "or more none are saved: plain MAR, exactly.",
        low=1, high=1000, step=1, paper=100, advanced=True)
    diffusion_steps_curve: str = knob("linear", "How the diffusion steps fall from the first AR step to the last. "
        "linear: evenly; cosine: fastest in the middle; two-stage: all in the first half, the end's in the second.",
        choices=("linear", "cosine", "two-stage"), advanced=True)

    def exact(self, side: int) -> bool:
        return not self.annealed and super().exact(side)

    @property
    def annealed(self) -> bool:
        """Whether the diffusion steps fall."""
        return self.diffusion_steps_end is not None and self.diffusion_steps_end < self.diffusion_steps


@dataclass(frozen=True)
class MARSettings(DiSASettings):
    """Plain MAR; MAR's own fields first, then DiSA's, then speculation in the diffusion head."""

    speculation: int = knob(0, "Diffusion steps drafted at a time with a stale prediction and verified in one "
        "evaluation of the head. Higher means fewer but larger evaluations, faster where a device waits. The "
        "distribution of images stays exactly MAR's. Usual: 8. 0 is off.", low=0, high=64, step=1, symbol="L",
        advanced=True)

    def exact(self, side: int) -> bool:
        return not self.speculation and super().exact(side)

    def lossless(self) -> bool:
        return bool(self.speculation) and super().exact(0)


@dataclass(frozen=True)
class FastHybridSettings(DiSASettings):
    """FastHybrid (CVPR 2026): lookahead drafts, verification by similarity, guided few-step refinement."""

    lookahead: int = knob(8, "AR steps drafted together; more means fewer full diffusion passes and staler drafts. "
        "Usual: 7 to 9 for 64 steps. 0 turns FastHybrid off: plain MAR, exactly.", low=0, high=256, step=1, symbol="k")
    threshold: float = knob(0.8, "Least cosine similarity between a draft's condition and the real one; higher rejects "
        "more drafts, slower and closer to plain MAR. Usual: 0.8 at full size, 0.9 to 0.99 on the demo. Above 1 every "
        "draft is redone in full: plain MAR.", low=-1.0, high=1.01, step=0.01, symbol="lambda")
    acceptance_target: float = knob(0.0, "Share of the drafts to keep: at every AR step the most similar ones, so that "
        "this many of all drafts so far are kept, whatever lambda is. Higher is faster and farther from plain MAR. "
        "Usual: 0.8. 0 leaves it to lambda.", low=0.0, high=1.0, step=0.01)
    guided_steps: int = knob(10, "Denoising steps of an accepted token, guided by its draft; more is slower and finer. "
        "Usual: 10.",
        low=1, high=1000, step=1, symbol="T_g")
    guidance_schedule: str = knob("cos", "How the draft's pull fades over the guided steps. cos: the paper's; "
        "linear-down: fades evenly; square: fades fast at first; linear-up: grows (the paper finds it worse); none: no "
        "pull, only few steps.",
        choices=("cos", "linear-down", "linear-up", "square", "none"), advanced=True)
    accepted: str = knob("refine", "What becomes of an accepted draft. refine: guided diffusion (the paper's RG); "
        "keep: it is the token (the paper's R: faster, texture artefacts).", choices=("refine", "keep"), advanced=True)
    lookahead_start: int = knob(0, "AR steps before the first lookahead; they are plain MAR's. The first tokens decide "
        "the image's content, so a few of them keep it MAR's own: slower and closer to MAR. Usual: an eighth to a "
        "third of the AR steps. 0, as in the paper, drafts from the start.", low=0, high=4096, step=1, unit="AR steps",
        advanced=True)

    def exact(self, side: int) -> bool:
        return (not self.lookahead or self.threshold > 1 and not self.acceptance_target) and super().exact(side)


@dataclass(frozen=True)
class CacheSettings(Guarantees):
    """LazyMAR (ICCV 2025): which features are kept from one AR step to the next, and for how long."""

    refresh_period: int = knob(9, "AR steps from one full computation to the next; in between, caches stand in for "
        "most of it. Higher is faster and less exact. Usual: 9 for 64 AR steps, 5 for 32 (the paper's). 1 keeps "
        "nothing, in the diffusion head neither: plain MAR, exactly.", low=1, high=4096, step=1, symbol="tau",
        unit="AR steps")
    start_step: int = knob(5, "AR steps whose transformer is computed in full at the beginning, where the image's "
        "content is decided; head_cache works from the first step on. Higher is slower and more exact. Usual: 5 for 64 "
        "AR steps, 4 for 32 (the paper's).", low=0, high=4096, step=1, unit="AR steps")
    computed_ratio: float = knob(0.05, "Share of the decoder's rows that the token cache still computes at the end of "
        "the image; it falls from all of them along the reference's curve. Lower is faster and less exact. Usual: "
        "0.05. 1 computes every row.",
        low=0.0, high=1.0, step=0.01)
    condition_cache: bool = knob(True, "Compute only the class's branch of guidance and add the difference to the null "
        "branch that the last full step found: half the transformer's work. Off is slower and more exact. Without "
        "guidance there is nothing to save.", advanced=True)
    token_cache: bool = knob(True, "Leave out decoder rows that hardly change and use their cached keys and values. "
        "Off is slower and more exact.", advanced=True)
    head_cache: bool = knob(True, "Reuse most of the diffusion head from one diffusion step to the next, and its null "
        "branch. The published code always does, and the paper's speed-ups include it, but the paper does not mention "
        "it. Off is slower and more exact.", advanced=True)
    encoder_cache: bool = knob(True, "Keep the encoder's keys and values of tokens decided earlier and compute only "
        "new ones. The published code always does; the paper does not mention it. Off is slower and more exact.",
        advanced=True)
    block: int | None = knob(None, "Which decoder block's values tell how much a row changed; the blocks before it "
        "compute every row. Higher chooses better and saves less. Usual: 4, the paper's, or in a shallower decoder the "
        "one after a quarter of its blocks.", low=1, high=256, step=1, paper=4, advanced=True)
    head_period: int = knob(7, "With head_cache: diffusion steps from one full evaluation of the head to the next, of "
        "100. With fewer diffusion steps it shrinks along, and where it is 1 all are full. Higher is faster and less "
        "exact. Usual: 7. 1 evaluates every step in full.", low=1, high=100, step=1, unit="% of the diffusion steps",
        advanced=True)

    def exact(self, side: int) -> bool:
        return self.refresh_period == 1 and super().exact(side)


@dataclass(frozen=True)
class LazyMARSettings(CacheSettings, DiSASettings):
    """Plain MAR with LazyMAR's caches; MAR's fields come first."""


@dataclass(frozen=True)
class FastHybridLazyMARSettings(CacheSettings, FastHybridSettings):
    """FastHybrid with LazyMAR's caches; FastHybrid's fields come first."""


@dataclass(frozen=True)
class CSpDSettings(MARBase):
    """CSpD (arXiv 2411.11925): a small MAR drafts, the large one verifies."""

    draft_length: int = knob(8, "AR steps drafted before the target verifies them; more means fewer passes of the "
        "target and staler or more often discarded drafts. Usual: an eighth of the AR steps. lossless drafts fewer "
        "while drafts are being rejected.", low=1, high=256, step=1, symbol="gamma", unit="AR steps")
    prefill_ratio: float = knob(0.15, "Share of the AR steps that the target makes alone at the beginning, where "
        "drafts are worst; higher is slower and closer to the target. Usual: 0.05 to 0.15. The first AR step always is "
        "the target's; at 1 all are: plain MAR, exactly.", low=0.0, high=1.0, step=0.01)
    mode: str = knob("lossless", "lossless: the images' distribution is exactly the target's, whatever the draft. "
        "published: approximate, the published code's rule, which keeps most of what a draft makes.",
        choices=("lossless", "published"))
    inner_temperature: float = knob(42.0, "published: widens the last diffusion step's densities that a draft is "
        "judged by; higher accepts more and worse drafts. Usual: 42, the published code's. lossless has none.",
        low=0.5, high=1000.0, step=0.5, advanced=True)
    alignment: bool = knob(True, "Draft and target share the noise of every token, so that they tend to make the same "
        "one (the paper's trajectory alignment). Off rejects more. lossless judges the draft's own path and has no use "
        "for it.", advanced=True)
    speculation: int = knob(0, "Diffusion steps drafted at a time with a stale prediction and verified in one "
        "evaluation of the head, as in MAR, where the target works alone: pre-fill, and what lossless rejects. Exact. "
        "Usual: 8. 0 is off.",
        low=0, high=64, step=1, symbol="L", advanced=True)

    def exact(self, side: int) -> bool:
        return self.prefill_ratio >= 1 and not self.speculation and super().exact(side)

    def lossless(self) -> bool:
        same = self.mode == "lossless" or self.prefill_ratio >= 1

        return same and super().exact(0) and not self.exact(0)


@dataclass(frozen=True)
class CSpDLazyMARSettings(CacheSettings, CSpDSettings):
    """CSpD whose models run with LazyMAR's caches; CSpD's fields come first."""

    def lossless(self) -> bool:
        return self.refresh_period == 1 and super().lossless()
