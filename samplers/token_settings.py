"""Settings of the samplers of discrete tokens; see ``settings.py`` for what a field carries."""

from __future__ import annotations

from dataclasses import dataclass

from .settings import knob


@dataclass(frozen=True)
class TokenSettings:
    """LlamaGen (Sun et al. 2024) and whatever shares its way of sampling a token."""

    cfg: float = knob(
        4.0, "Guidance towards the condition; higher is more typical and less varied. Usual: 4 for classes and for Tar, 7.5 for text, "
        "1.5 to 2 where variety is measured. At 1 there is no guidance and half the work.",
        low=1.0, high=20.0, step=0.05, symbol="cfg scale",
    )  # fmt: skip
    temperature: float = knob(
        1.0, "Scale of the randomness in every token; lower is safer and less varied. Usual: 1. At 0 the likeliest "
        "token is taken.", low=0.0, high=2.0, step=0.01, symbol="temperature",
    )  # fmt: skip
    top_k: int = knob(
        2000, "Only the so many likeliest values of a token can be drawn; fewer is cleaner and less varied. Usual: 2000 "
        "for classes, 1000 for text, 0 for Tar. 0 allows all; 1 takes the likeliest.", low=0, high=65536, step=1, symbol="top-k",
    )  # fmt: skip
    top_p: float = knob(
        1.0, "Only the likeliest values that together reach this probability can be drawn; lower is cleaner and less "
        "varied. Usual: 1, which allows all.", low=0.0, high=1.0, step=0.01, symbol="top-p", advanced=True,
    )  # fmt: skip
    cfg_interval: int = knob(
        -1, "Guidance ends after so many decoding steps, which saves half the work from there on. Usual: -1, guidance "
        "to the end. PAR and ZipAR count anew after their sequential start, as published.",
        low=-1, high=65536, step=1, symbol="cfg interval", advanced=True,
    )  # fmt: skip


@dataclass(frozen=True)
class LlamaGenSettings(TokenSettings):
    """Plain LlamaGen: one token after another, row by row."""


ADJACENT, NON_LOCAL, TRAINED = "ablation: adjacent", "ablation: non-local", "from checkpoint"


@dataclass(frozen=True)
class PARSettings(TokenSettings):
    """PAR (CVPR 2025): the same cell of every region of the picture in one step."""

    grouping: str = knob(
        TRAINED, "Which tokens are decided together. from checkpoint: the groups a PAR was trained for. The other two "
        "are the paper's ablations, tried on a plain LlamaGen, which was trained for neither: non-local: PAR's groups; "
        "adjacent: neighbours in a row (the paper finds it much worse).", choices=(TRAINED, NON_LOCAL, ADJACENT),
    )  # fmt: skip
    sequential_start: bool = knob(
        True, "Decide the first token of every region one after another, so that the regions agree on the picture. Off "
        "is the paper's ablation: all of them at once.", advanced=True,
    )  # fmt: skip
    group: int = knob(
        4, "Tokens decided together in an ablation; more is faster and less coherent. Usual: 4 or 16. A PAR knows its "
        "own number and ignores this.", low=1, high=256, step=1, symbol="n", advanced=True,
    )  # fmt: skip


@dataclass(frozen=True)
class ZipARSettings(TokenSettings):
    """ZipAR (ICML 2025): a row starts when the row above is a window ahead."""

    window: int = knob(
        8, "How many tokens of a row must be there before the next row starts; fewer is faster and less coherent. "
        "Usual: 8 for 256 and 384 pixels, 16 for more. A whole row or more is plain LlamaGen, exactly.",
        low=1, high=256, step=1, symbol="s",
    )  # fmt: skip
    mask_undecoded: bool = knob(
        True, "Hide the cells above that are not decided yet. Off is what the published code does: they are seen as "
        "blanks, which weakens everything else.", advanced=True,
    )  # fmt: skip


DETAILS = ("729", "169", "81")


@dataclass(frozen=True)
class TarPromptSettings:
    """Tar (Han et al. 2025): from a prompt to the semantic codes of a picture."""

    detail: str = knob(
        "729", "How many semantic codes tell what the picture shows; fewer is faster and vaguer. Usual: 729, on which Tar was "
        "trained most. A model with another grid writes its own three numbers in their place.", choices=DETAILS, symbol="scale",
    )  # fmt: skip
    temperature: float = knob(
        1.0, "Scale of the randomness in every code; lower is safer and less varied. Usual: 1. At 0 the likeliest code is taken.",
        low=0.0, high=2.0, step=0.01, symbol="temperature",
    )  # fmt: skip
    top_p: float = knob(
        0.95, "Only the likeliest codes that together reach this probability can be drawn; lower is safer and less varied. Usual: 0.95. "
        "1 allows all.", low=0.0, high=1.0, step=0.01, symbol="top-p",
    )  # fmt: skip
    top_k: int = knob(
        1200, "Only the so many likeliest codes can be drawn; fewer is safer and less varied. Usual: 1200. 0 allows all; 1 takes the "
        "likeliest.", low=0, high=65536, step=1, symbol="top-k",
    )  # fmt: skip
    repetition_penalty: float = knob(
        0.0, "Makes codes that were written before less likely (above 1) or likelier (below); higher repeats less. Usual: 0, which takes "
        "what the checkpoint recommends. 1 is none, exactly.", low=0.0, high=2.0, step=0.01, advanced=True,
    )  # fmt: skip
