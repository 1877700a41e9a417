"""Settings of MuLo-SD and of the LANTERN-style comparison; see ``settings.py`` for what a field carries."""

from __future__ import annotations

from dataclasses import dataclass

from .settings import knob
from .token_settings import TokenSettings

PIXEL, LATENT = "pixel", "latent"
AT_ONCE, ONE_BY_ONE = "islands at once", "one by one"
LOCAL, SUFFIX = "local", "suffix"
DRAFTED, CERTAIN = "drafted", "certain"

# LANTERN's neighbours and the codes that it takes them from; "auto" keeps the share.
PUBLISHED_NEIGHBOURS, PUBLISHED_CODES = 1000, 16384


@dataclass(frozen=True)
class MuLoSDSettings(TokenSettings):
    """MuLo-SD (CVPR 2026): drafted small, verified large, repaired locally. Lossy: pictures differ from the target's own."""

    tau: float = knob(
        0.3, "Least probability, pooled over similar codes, of a drafted token that is kept; higher draws more tokens again, slower "
        "and closer to the target. No value is published, and it depends on the models. Above 1 everything is drawn again: with "
        "resample_window 0 exactly the target's own picture. At 0 the enlarged draft is kept as it is.",
        low=0.0, high=1.01, step=0.01, symbol="tau",
    )  # fmt: skip
    expansion: int = knob(
        1, "How far around a rejected token others are drawn again too, in tokens; more is slower and hides seams better. Usual: 1. 0 "
        "redraws rejected tokens only, which the paper finds bad.", low=0, high=16, step=1, symbol="l", unit="tokens",
    )  # fmt: skip
    acceptance_target: float = knob(
        0.0, "Share of the drafted tokens to keep: tau is then chosen for every picture so that this many pass. Higher is faster. "
        "Usual: 0.6 to 0.9. 0 leaves it to tau.", low=0.0, high=1.0, step=0.01, advanced=True,
    )  # fmt: skip
    neighbours: int = knob(
        -1, "How many similar codes share their probability with a drafted one; more keeps more of the draft. Usual: -1, LANTERN's "
        "share of the codebook (1000 of 16,384). 0 looks at the drafted code alone, and needs a far lower tau.",
        low=-1, high=65536, step=1, symbol="k", advanced=True,
    )  # fmt: skip
    draft_rows: int = knob(
        0, "Rows that the draft model writes before they are verified; then what was verified is made small again and it goes on from "
        "there. Fewer is slower, and the draft sees more of the target's work. Usual: 0, the whole picture at once (the paper's).",
        low=0, high=256, step=1, advanced=True,
    )  # fmt: skip
    draft_window: int = knob(
        8, "ZipAR's window of the draft model: how many tokens of a row must be there before the next one starts. Fewer is faster and "
        "less coherent. Usual: 8. 0, or a whole row, drafts one token after another.", low=0, high=256, step=1, advanced=True,
    )  # fmt: skip
    resample_window: int = knob(
        8, "The same within an island of tokens to draw again. Usual: 4 to 16. 0 goes row by row, token by token: slower, and what the "
        "target would do.", low=0, high=256, step=1, advanced=True,
    )  # fmt: skip
    resample_order: str = knob(
        AT_ONCE, "islands at once: islands that do not touch are drawn again at the same time (the paper's). one by one: all tokens in "
        "one raster order, the paper's slower comparison.", choices=(AT_ONCE, ONE_BY_ONE), advanced=True,
    )  # fmt: skip
    up_sampler: str = knob(
        PIXEL, "How the draft is enlarged. pixel: decoded, enlarged (bicubic, or by the upscale model connected) and encoded again, the "
        "paper's default. latent: by a small learned network, without decoding, where there is one.",
        choices=(PIXEL, LATENT), advanced=True,
    )  # fmt: skip
    repair: str = knob(
        LOCAL, "What a rejection costs. local: its neighbourhood. suffix: everything after the first rejected token, as in earlier "
        "speculative decoding (the paper's comparison).", choices=(LOCAL, SUFFIX), advanced=True,
    )  # fmt: skip


@dataclass(frozen=True)
class LanternSettings(TokenSettings):
    """Comparison in LANTERN's style (ICLR 2025): relaxed acceptance in raster order; the first rejection discards the rest."""

    draft_length: int = knob(
        4, "Tokens drafted before the target verifies them; more means fewer passes of the target and more drafts thrown away. Usual: 4.",
        low=1, high=256, step=1, symbol="gamma", unit="tokens",
    )  # fmt: skip
    delta: float = knob(
        0.4, "How much probability of similar codes may count for a drafted one. Higher accepts more and is further from the target. "
        "Usual: 0.1 to 0.4. Above 1 it is LANTERN++'s lambda, and delta - 1 times the drafted code's own probability may count.",
        low=0.0, high=100.0, step=0.05, symbol="delta",
    )  # fmt: skip
    neighbours: int = knob(
        -1, "How many similar codes may count. Usual: -1, LANTERN's share of the codebook (1000 of 16,384). 0 is plain speculative "
        "decoding, whose pictures have exactly the target's distribution.", low=-1, high=65536, step=1, symbol="k",
    )  # fmt: skip
    draft_cfg: float = knob(
        1.0, "Guidance of the draft model. At 1 it has none and does half the work; the nearer to cfg, the more drafts are kept.",
        low=1.0, high=20.0, step=0.05, advanced=True,
    )  # fmt: skip
    drafts: str = knob(
        DRAFTED, "How likely a draft counts as having been. drafted: as likely as the draft model made it (the published static tree); "
        "certain: as if it were the only choice (the published dynamic tree), which keeps fewer.",
        choices=(DRAFTED, CERTAIN), advanced=True,
    )  # fmt: skip


def neighbours_of(settings: MuLoSDSettings | LanternSettings, codes: int) -> int:
    """How many neighbours the setting asks for, of a codebook of ``codes``."""
    if settings.neighbours >= 0:
        return settings.neighbours
    return round(codes * PUBLISHED_NEIGHBOURS / PUBLISHED_CODES)
