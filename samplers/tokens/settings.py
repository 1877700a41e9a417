"""Settings of the samplers of discrete tokens; see ``samplers/settings.py`` for the metadata of a field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..settings import Guarantees, Settings, knob


@dataclass(frozen=True)
class TokenSettings(Guarantees):
    """Sampling of a token, shared by all samplers of discrete tokens."""

    cfg: float | None = knob(
        None,
        "Guidance towards the condition; higher is more typical and less varied. Usual: the model's published "
        "value: 4 for classes and for Tar, 5 for Janus, 7.5 for text, 1.3 to 1.5 for PAR. At 1 there is no "
        "guidance and half the work.",
        low=1.0,
        high=20.0,
        step=0.05,
        paper=4.0,
        symbol="cfg scale",
    )
    temperature: float = knob(
        1.0,
        "Scale of the randomness in every token; lower is safer and less varied. Usual: 1. At 0 the likeliest "
        "token is taken.",
        low=0.0,
        high=2.0,
        step=0.01,
        symbol="temperature",
    )
    top_k: int | None = knob(
        None,
        "Only this many of the likeliest values of a token can be drawn; fewer is cleaner and less varied. Usual: "
        "the model's published value: 2000 for classes, 1000 for text, all for Tar, Janus and PAR. 0 allows all; "
        "1 takes the likeliest.",
        low=0,
        high=65536,
        step=1,
        paper=2000,
        symbol="top-k",
    )
    top_p: float = knob(
        1.0,
        "Only the likeliest values that together reach this probability can be drawn; lower is cleaner and less "
        "varied. Usual: 1, which allows all.",
        low=0.0,
        high=1.0,
        step=0.01,
        symbol="top-p",
        advanced=True,
    )
    cfg_interval: int | None = knob(
        None,
        "Guidance ends after this many decoding steps, which saves half the work from there on. Usual: as many as "
        "the image has tokens, or more: guidance to the end. PAR and ZipAR count anew after their sequential start, "
        "as published.",
        low=0,
        high=65536,
        step=1,
        paper=4096,
        symbol="cfg interval",
        advanced=True,
    )


def guides(settings: TokenSettings) -> bool:
    """Whether the null branch is evaluated; None, which :func:`.loop.resolve` replaces, counts as no guidance."""
    return settings.cfg is not None and settings.cfg > 1


_EXACT = "In fp32 the same image token for token; in half precision another image of the same distribution."


def _window(usual: str, what: str = "Passes") -> Any:
    text = f"{what} that one call guesses ahead and checks; more is fewer calls of more rows. {_EXACT} {usual}"
    return knob(0, text, low=0, high=4096, step=1, symbol="W", advanced=True)


_SIDE = (
    "Usual: the image's side in tokens (16 for 256 pixels), twice that for a single image on a GPU. 0 is one pass "
    "after another, "
    "about as fast on a CPU from 4 images on."
)


@dataclass(frozen=True)
class LlamaGenSettings(TokenSettings):
    """Plain LlamaGen: one token after another, row by row."""

    parallel: int = _window(_SIDE)


ADJACENT = "ablation: adjacent"
NON_LOCAL = "ablation: non-local"
TRAINED = "from checkpoint"


@dataclass(frozen=True)
class PARSettings(TokenSettings):
    """PAR (CVPR 2025): one token per region of the image in parallel."""

    grouping: str = knob(
        TRAINED,
        "Which tokens are decided together. from checkpoint: the groups a PAR was trained for. The other two are "
        "the paper's ablations, tried on a plain LlamaGen, which was trained for neither: non-local: PAR's "
        "groups; adjacent: neighbours in a row (the paper finds it much worse).",
        choices=(TRAINED, NON_LOCAL, ADJACENT),
    )
    sequential_start: bool = knob(
        True,
        "Decide the first token of every region one after another, so that the regions agree on the image. Off "
        "is the paper's ablation: all of them at once.",
        advanced=True,
    )
    group: int = knob(
        4,
        "Tokens decided together in an ablation; more is faster and less coherent. Usual: 4 or 16. A PAR has its "
        "own number and ignores this.",
        low=1,
        high=256,
        step=1,
        symbol="n",
        advanced=True,
    )
    parallel: int = _window(_SIDE)

    def exact(self, side: int) -> bool:
        return self.grouping != TRAINED and self.group == 1


@dataclass(frozen=True)
class ZipARSettings(TokenSettings):
    """ZipAR (ICML 2025): a row starts when the row above is a window ahead."""

    window: int = knob(
        8,
        "How many tokens of a row must be there before the next row starts; fewer is faster and less coherent. "
        "Usual: 8 for 256 and 384 pixels, 16 for more. A whole row or more is plain LlamaGen, exactly.",
        low=1,
        high=256,
        step=1,
        symbol="s",
    )
    mask_undecoded: bool = knob(
        True,
        "Hide the cells above that are not decided yet. Off is what the published code does: they are seen as "
        "blanks, which weakens everything else.",
        advanced=True,
    )
    parallel: int = _window(_SIDE)

    def exact(self, side: int) -> bool:
        return self.window >= side


DETAILS = ("729", "169", "81")


@dataclass(frozen=True)
class TarPromptSettings(Settings):
    """Tar (Han et al. 2025): from a prompt to the semantic codes of an image."""

    detail: str = knob(
        "729",
        "Number of semantic codes that describe the image; fewer is faster and vaguer. Usual: 729, on which Tar "
        "was trained most. A model with another grid has its own three numbers in their place.",
        choices=DETAILS,
        symbol="scale",
    )
    temperature: float = knob(
        1.0,
        "Scale of the randomness in every code; lower is safer and less varied. Usual: 1. At 0 the likeliest code "
        "is taken.",
        low=0.0,
        high=2.0,
        step=0.01,
        symbol="temperature",
    )
    top_p: float = knob(
        0.95,
        "Only the likeliest codes that together reach this probability can be drawn; lower is safer and less "
        "varied. Usual: 0.95. 1 allows all.",
        low=0.0,
        high=1.0,
        step=0.01,
        symbol="top-p",
    )
    top_k: int = knob(
        1200,
        "Only this many of the likeliest codes can be drawn; fewer is safer and less varied. Usual: 1200. 0 "
        "allows all; 1 takes the likeliest.",
        low=0,
        high=65536,
        step=1,
        symbol="top-k",
    )
    repetition_penalty: float | None = knob(
        None,
        "Makes codes that were written before less likely (above 1) or likelier (below); higher repeats less. "
        "Usual: what the checkpoint recommends. 1 is none, exactly.",
        low=0.01,
        high=2.0,
        step=0.01,
        paper=1.0,
        advanced=True,
    )
    parallel: int = _window("Usual: 32 on a GPU. 0 is one code after another.", "Codes")


AT_ONCE = "islands at once"
ONE_BY_ONE = "one by one"
LOCAL = "local"
SUFFIX = "suffix"

# LANTERN's number of neighbours, and the size of its codebook; the default keeps the ratio.
PUBLISHED_NEIGHBOURS = 1000
PUBLISHED_CODES = 16384


@dataclass(frozen=True)
class MuLoSDSettings(TokenSettings):
    """MuLo-SD (CVPR 2026): drafted small, verified large, repaired locally. Lossy: images differ from the target's
    own.
    """

    tau: float = knob(
        0.3,
        "Least probability, pooled over similar codes, of a drafted token that is kept; higher draws more tokens "
        "again, slower and closer to the target. No value is published, and it depends on the models. Above 1 "
        "everything is drawn again: with resample_window 0 exactly the target's own image. At 0 the enlarged "
        "draft is kept as it is.",
        low=0.0,
        high=1.01,
        step=0.01,
        symbol="tau",
    )
    expansion: int = knob(
        1,
        "How far around a rejected token others are drawn again too, in tokens; more is slower and hides seams "
        "better. Usual: 1. 0 redraws rejected tokens only, which the paper finds bad.",
        low=0,
        high=16,
        step=1,
        symbol="l",
        unit="tokens",
    )
    acceptance_target: float = knob(
        0.0,
        "Share of the drafted tokens to keep: tau is then chosen for every image so that this many pass. Higher "
        "is faster. Usual: 0.6 to 0.9. 0 leaves it to tau.",
        low=0.0,
        high=1.0,
        step=0.01,
        advanced=True,
    )
    neighbours: int | None = knob(
        None,
        "How many similar codes share their probability with a drafted one; more keeps more of the draft. Usual: "
        "LANTERN's share of the codebook (1000 of 16,384). 0 looks at the drafted code alone, and needs a far "
        "lower tau.",
        low=0,
        high=65536,
        step=1,
        paper=PUBLISHED_NEIGHBOURS,
        symbol="k",
        advanced=True,
    )
    draft_rows: int | None = knob(
        None,
        "Rows that the draft model writes before they are verified; then what was verified is made small again "
        "and it goes on from there. Fewer is slower, and the draft sees more of the target's work. Usual: all the "
        "rows of the draft or more, the whole image at once (the paper's).",
        low=1,
        high=256,
        step=1,
        paper=64,
        advanced=True,
    )
    draft_window: int = knob(
        8,
        "ZipAR's window of the draft model: how many tokens of a row must be there before the next one starts. "
        "Fewer is faster and less coherent. Usual: 8. 0, or a whole row, drafts one token after another.",
        low=0,
        high=256,
        step=1,
        advanced=True,
    )
    resample_window: int = knob(
        8,
        "The same within an island of tokens to draw again. Usual: 4 to 16. 0 goes row by row, token by token: "
        "slower, and what the target would do.",
        low=0,
        high=256,
        step=1,
        advanced=True,
    )
    resample_order: str = knob(
        AT_ONCE,
        "islands at once: islands that do not touch are drawn again at the same time (the paper's). one by one: "
        "all tokens in one raster order, the paper's slower comparison.",
        choices=(AT_ONCE, ONE_BY_ONE),
        advanced=True,
    )
    repair: str = knob(
        LOCAL,
        "What a rejection costs. local: its neighbourhood. suffix: everything after the first rejected token, as "
        "in earlier speculative decoding (the paper's comparison).",
        choices=(LOCAL, SUFFIX),
        advanced=True,
    )
    draft_parallel: int = _window(
        "Usual: the draft's side in tokens. 0 is one pass after another.", "Passes of the draft model"
    )

    def exact(self, side: int) -> bool:
        return self.tau > 1 and not self.acceptance_target and not self.resample_window


def rows_at_once(settings: MuLoSDSettings, small: int) -> int:
    """Rows that the draft model writes at once, of a draft of ``small`` rows."""
    return small if settings.draft_rows is None else min(settings.draft_rows, small)


def neighbours_of(settings: MuLoSDSettings, codes: int) -> int:
    """Number of neighbours for a codebook of ``codes``; None keeps LANTERN's share of the codebook."""
    if settings.neighbours is not None:
        return settings.neighbours

    return round(codes * PUBLISHED_NEIGHBOURS / PUBLISHED_CODES)
