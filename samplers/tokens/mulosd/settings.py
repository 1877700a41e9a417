"""Settings of MuLo-SD; ``samplers/settings.py`` explains the arguments of a field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...settings import knob
from ..settings import TokenSettings, cfg_knob, entropy_temperature_knob, top_k_knob

# Each call of ``knob`` has the default and the tooltip first, then the range.
# fmt: off

# Choices of the setting "resample_order".
AT_ONCE = "islands at once"
ONE_BY_ONE = "one by one"
# Choices of the setting "repair".
LOCAL = "local"
SUFFIX = "suffix"

# Number of neighbours in LANTERN (see verification.py), and number of codes in LANTERN's codebook. For a codebook of a
# different size, the default number of neighbours is the same share of its codes.
PUBLISHED_NEIGHBOURS = 1000
PUBLISHED_CODES = 16384


@dataclass(frozen=True)
class MuLoSDSettings(TokenSettings):
    """Settings of MuLo-SD (CVPR 2026). A draft model generates a small image. The target verifies the enlarged image
    and resamples parts of it. The method is lossy: it changes the distribution of the target's images.
    """

    different_image: ClassVar[bool] = True

    cfg: float | None = cfg_knob("4 for class labels and for Tar, 7.5 for LlamaGen's text-to-image models")
    top_k: int | None = top_k_knob("2000 for class labels, 1000 for LlamaGen's text-to-image models, and 0 for Tar")
    tau: float = knob(0.3,
        "Lowest probability at which a draft token is accepted; higher is slower and closer to the image of the large "
        "model. Start with 0.3; at 0, the whole draft is accepted, and above 1 every token is resampled.",
        low=0.0, high=1.01, step=0.01,
        more="The right *tau* depends on the models: read the share of accepted drafts in the report, then lower *tau* "
            "to accept more drafts, or raise *tau* to accept fewer drafts.")
    expansion: int = knob(1,
        "Tokens within this distance of a rejected token are resampled too; a larger distance is slower and hides "
        "seams better. Usual: 1; at 0, only the rejected tokens are resampled.",
        low=0, high=16, step=1, symbol="l", unit="tokens",
        more="With *expansion* 0, images are worse in the paper, but better on the demo.")
    acceptance_target: float = knob(0.0,
        "Share of the draft tokens to accept; above 0, the sampler ignores tau. Higher is faster, and the image is "
        "less like the large model's image. Usual: 0.9 to 0.98; at 0, tau decides which draft tokens are accepted.",
        low=0.0, high=1.0, step=0.01, advanced=True,
        more="If *expansion* is 1 and the rejected tokens are spread at random over a 32 x 32 grid, the sampler "
            "resamples 95 % of all tokens at *acceptance_target* 0.7, and 36 % at 0.95.")
    neighbours: int | None = knob(None,
        "The probabilities of this many similar codes (a code is a value of a token) are added to the probability of "
        "the draft token's code; with more neighbours, more draft tokens are accepted. Usual: 1000 for a model with "
        "16,384 codes, and 6 % of the codes for other models; at 0, tau must be much lower.",
        low=0, high=65536, step=1, full_size_value=PUBLISHED_NEIGHBOURS, symbol="k", advanced=True)
    draft_rows: int = knob(4,
        "The draft model drafts this many rows of the small image, the large model verifies these rows, and the "
        "draft model continues from the result; fewer rows are slower. Usual: 4 to 8 (our choice, because the paper "
        "gives no number); at 0, the whole small image is drafted first.",
        low=0, high=256, step=1, advanced=True)
    draft_window: int = knob(8,
        "Number of tokens of a row that the draft model decides before it starts the next row; a smaller number is "
        "faster, and the image is less coherent. Usual: 8; at 0, the draft model decides one token after another.",
        low=0, high=256, step=1, advanced=True)
    resample_window: int = knob(8,
        "In a resampled area, the large model decides this many tokens of a row before it starts the next row; a "
        "smaller number is faster, but 0 is slowest. Usual: 4 to 16; at 0, the tokens of an area are resampled one "
        "after another.",
        low=0, high=256, step=1, advanced=True)
    resample_order: str = knob(AT_ONCE,
        "With islands at once, separate areas are resampled at the same time, as in the paper. With one by one, the "
        "sampler ignores resample_window and resamples one token after another, which is slower.",
        choices=(AT_ONCE, ONE_BY_ONE), advanced=True)
    repair: str = knob(LOCAL,
        "What is resampled after a rejection. Usual: local, which resamples the area around the rejected token. The "
        "other choice, suffix, resamples every token after the rejected token.",
        choices=(LOCAL, SUFFIX), advanced=True)
    draft_parallel: int = knob(0,
        "Number of tokens of the draft that are guessed ahead. One pass of the draft model verifies all guesses, so "
        "fewer passes are needed; in fp32, the draft stays identical. Usual: the draft's side in tokens; at 0, no "
        "guesses are made.",
        low=0, high=4096, step=1, advanced=True)
    entropy_temperature: float = entropy_temperature_knob("token")

    def exact(self, side: int) -> bool:
        """Whether the tokens are identical to the tokens of serial decoding, up to rounding in fp32.

        With *tau* above 1 and *acceptance_target* 0, every draft token is rejected, so the whole block is one island.
        If the order is also raster order, each wave resamples one cell: the target decodes the block serially. It uses
        the random numbers that LlamaGen uses for the same cells. So the tokens are identical, whatever the draft is.
        """
        in_raster_order = not self.resample_window or self.resample_order == ONE_BY_ONE
        return self.tau > 1 and not self.acceptance_target and in_raster_order

    def rows_at_once(self, draft_side: int) -> int:
        """Number of rows that are drafted before the target verifies them. A draft has ``draft_side`` rows."""
        return min(self.draft_rows or draft_side, draft_side)

    def neighbours_among(self, codes: int) -> int:
        """Number of neighbours of a code in a codebook with ``codes`` codes. If *neighbours* is None, the neighbours
        are the same share of the codebook as in LANTERN.
        """
        if self.neighbours is not None:
            return self.neighbours

        return round(codes * PUBLISHED_NEIGHBOURS / PUBLISHED_CODES)
