"""Settings of the samplers of discrete tokens; see ``samplers/settings.py`` for the metadata of a field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...networks.llama import TokenModel
from ...reports.record import Report
from ..settings import Guarantees, Settings, knob
from .schedule import Schedule, raster

# A field is its default and sentence, then its range.
# fmt: off


def top_p_knob(advanced: bool) -> Any:
    """The setting that cuts the tail of a token's distribution; it is in front where it is what a user tries first."""
    return knob(1.0,
        "Sample only from the likeliest values that together reach this probability; lower is cleaner and less "
        "varied. Usual: 1, which allows all values.",
        low=0.0, high=1.0, step=0.01, advanced=advanced,
        more="For the demo, use 0.8.")


@dataclass(frozen=True)
class TokenSettings(Guarantees):
    """Sampling of a token, shared by all samplers of discrete tokens."""

    cfg: float | None = knob(None,
        "How closely the image follows the condition; higher is more typical and less varied. Usual: 4 for classes "
        "and Tar, 5 for Janus, 7.5 for text, 1.3 to 1.5 for PAR; 1 turns guidance off and halves the work.",
        low=1.0, high=20.0, step=0.05, paper=4.0,
        more="For the demo, use 1.5. With classes, 1.5 to 2 gives more variety.")
    temperature: float = knob(1.0,
        "Randomness of every token; lower is safer and less varied. Usual: 1; 0 always takes the likeliest token.",
        low=0.0, high=2.0, step=0.01)
    top_k: int | None = knob(None,
        "Sample only from this many of the likeliest values of a token; fewer is cleaner and less varied. Usual: "
        "2000 for classes, 1000 for text; 0 allows all values, as for Tar, Janus and PAR.",
        low=0, high=65536, step=1, paper=2000,
        more="At 1, it always takes the likeliest value. On the demo, 10 and more change nothing, because *top_p* 0.8 "
        "leaves fewer values.")
    top_p: float = top_p_knob(advanced=True)
    cfg_interval: int | None = knob(None,
        "Guidance ends after this many decoding steps, which halves the work from there on. Usual: the number of "
        "tokens of the image, or more, for guidance to the end.",
        low=0, high=65536, step=1, paper=4096, advanced=True)
    @property
    def guides(self) -> bool:
        """Whether guidance is applied, for which the null branch is evaluated; not if cfg is None, which
        :func:`.defaults.resolve` replaces.
        """
        return self.cfg is not None and self.cfg > 1

    # A setting of every sampler. Each declares it as its last one: a saved graph keeps the values of widgets in their
    # order.
    entropy_temperature = 0.0

    def schedule(self, model: TokenModel) -> Schedule:
        """The passes that decide an image of a model.

        Raises:
            UserError: the settings do not fit the model.
        """
        return raster(model.grid)


def parallel_knob(
    what: str, usual: str, more: str = "", same: str = "identical image (in half precision, the same image as with 1)"
) -> Any:
    """The setting of Jacobi decoding: ``what`` it predicts, its usual value, the longer text of its help, and which
    image is the ``same``.
    """
    return knob(
        0,
        f"Guess this many {what} ahead and verify the guesses in one pass: fewer passes, {same}. Usual: {usual}; 0 "
        "turns it off.",
        low=0,
        high=4096,
        step=1,
        advanced=True,
        more=more,
    )


# The longer text of a method whose passes are predicted.
OF_PASSES = (
    "In fp32, this sampler gives the same image with and without it. In half precision, all values from 1 to the side "
    "of the grid give the same image."
)


def entropy_temperature_knob(what: str) -> Any:
    """The setting of the temperature by entropy (``draws.py``); ``what`` is drawn with it."""
    return knob(
        0.0,
        f"Raises the temperature where the model is certain of a {what} and lowers it where the model is uncertain; "
        f"higher has more effect. Usual: 0, the same temperature for every {what}; 1 is the published strength.",
        low=0.0,
        high=1.0,
        step=0.05,
        advanced=True,
        more="Even areas get more variety. At 1, *temperature* is multiplied by 2.5 exp(-H / 3) + 0.6, where H is "
            f"the entropy in nats of the values that may be sampled: by 3.1 if the model is certain of a {what}, by "
            "less than 1 above 5.5 nats. On the demo, it needs a lower *temperature*; see docs/benchmarks.md in the "
            "repository. The paper has no results for Tar.",
    )


SIDE = "the image's side in tokens (16 for 256 pixels)"


def one_a_pass(report: Report) -> str:
    """Why a run that should decide several tokens in a pass gained nothing; "" if it decided several."""
    return "Every pass decided one token, as in plain decoding." if (report.tokens_per_pass or 2) <= 1 else ""


@dataclass(frozen=True)
class LlamaGenSettings(TokenSettings):
    """Plain LlamaGen: one token after another, row by row."""

    top_p: float = top_p_knob(advanced=False)
    parallel: int = parallel_knob("tokens", SIDE,
        "A pass predicts the next tokens from guesses and confirms every guess that it predicts itself (Jacobi "
        "iteration). In half precision, every value from 1 to the side of the grid gives the same image, and 0 "
        "gives a different image from the same distribution: compare with 1, or choose *dtype* fp32 in the loader. "
        "On the demo, 16 takes about 65 passes instead of 256. For a single image on a GPU, twice the side may be "
        "faster. On a CPU, it gains little from 4 images on.")
    entropy_temperature: float = entropy_temperature_knob("token")

    def no_gain(self, report: Report) -> str:
        return one_a_pass(report) if self.parallel > 1 else ""


DETAILS = ("729", "169", "81")


@dataclass(frozen=True)
class TarPromptSettings(Settings):
    """Tar (Han et al. 2025): from a prompt to the semantic codes of an image."""

    detail: str = knob(
        "729",
        "Number of semantic codes that describe the image; fewer is faster and vaguer. Usual: 729, on which Tar was "
        "trained most.",
        choices=DETAILS,
        more="A model with a different grid replaces the three numbers by its own.")
    temperature: float = knob(1.0,
        "Randomness of every code; lower is safer and less varied. Usual: 1; 0 always takes the likeliest code.",
        low=0.0, high=2.0, step=0.01)
    top_p: float = knob(0.95,
        "Sample only from the likeliest codes that together reach this probability; lower is safer and less varied. "
        "Usual: 0.95; 1 allows all codes.",
        low=0.0, high=1.0, step=0.01)
    top_k: int = knob(1200,
        "Sample only from this many of the likeliest codes; fewer is safer and less varied. Usual: 1200; 0 allows "
        "all codes, 1 always takes the likeliest.",
        low=0, high=65536, step=1)
    repetition_penalty: float | None = knob(None,
        "Makes codes that already occurred less likely; higher repeats less. Usual: the value that the model's file "
        "recommends; 1 turns it off.",
        low=0.01, high=2.0, step=0.01, paper=1.0, advanced=True)
    parallel: int = parallel_knob("codes", "32 on a GPU",
        "In half precision, 0 gives different codes from the same distribution.",
        "identical codes (in half precision, the codes of 1)")
    entropy_temperature: float = entropy_temperature_knob("code")


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

    another_image: ClassVar[bool] = True

    tau: float = knob(0.3,
        "Lowest probability at which a draft token is accepted; higher is slower and closer to the large model. "
        "Start with 0.3; 0 accepts the whole draft, above 1 everything is resampled.",
        low=0.0, high=1.01, step=0.01,
        more="The probability is summed over similar codes (*neighbours*). The right value depends on the models: "
            "read *drafts accepted* in the report, then adjust it.")
    expansion: int = knob(1,
        "Radius in tokens around a rejected token that is resampled too; more is slower and hides seams better. "
        "Usual: 1; 0 resamples rejected tokens only.",
        low=0, high=16, step=1, symbol="l", unit="tokens",
        more="In the paper, 0 is worse; on the demo, it is better.")
    acceptance_target: float = knob(0.0,
        "Share of the draft tokens to accept, instead of tau; higher is faster and less like the large model. "
        "Usual: 0.9 to 0.98; 0 uses tau.",
        low=0.0, high=1.0, step=0.01, advanced=True,
        more="Neighbours are resampled too. On a 32 x 32 grid with independent rejections, 0.7 resamples 95% of the "
            "tokens, and 0.95 resamples 35%.")
    neighbours: int | None = knob(None,
        "Number of similar codes whose probability is added to the probability of the draft code; more accepts more "
        "of the draft. Usual: 1000 of 16,384 codes, or the same share; 0 needs a much lower tau.",
        low=0, high=65536, step=1, paper=PUBLISHED_NEIGHBOURS, symbol="k", advanced=True,
        more="For the demo's 512 codes, this share is 31.")
    draft_rows: int = knob(4,
        "Rows of the small image that are drafted before the large model verifies them; the next rows are drafted "
        "from the result, and fewer rows are slower. Usual: 4 to 8, as the paper gives no number; 0 drafts the "
        "whole image first.",
        low=0, high=256, step=1, advanced=True,
        more="With fewer rows, the sampler also accepts fewer drafts, because a row is enlarged before the rows "
            "below it exist.")
    draft_window: int = knob(8,
        "Tokens of a row that the draft model decides before its next row starts; fewer is faster and less coherent. "
        "Usual: 8; 0 drafts one token after another.",
        low=0, high=256, step=1, advanced=True,
        more="It works like *window* of ZipAR Sampler.")
    resample_window: int = knob(8,
        "The same as draft_window, for the areas that the large model resamples. Usual: 4 to 16; 0 is slower and "
        "resamples the tokens of an area one after another, but separate areas still at the same time.",
        low=0, high=256, step=1, advanced=True)
    resample_order: str = knob(AT_ONCE,
        "islands at once resamples separate areas at the same time, as in the paper. one by one is slower: it "
        "ignores resample_window and resamples one token after another.",
        choices=(AT_ONCE, ONE_BY_ONE), advanced=True)
    repair: str = knob(LOCAL,
        "What is resampled after a rejection. Usual: local, the area around the rejected token; suffix resamples "
        "everything after it, for comparison as in the paper.",
        choices=(LOCAL, SUFFIX), advanced=True,
        more="Earlier speculative decoding works like *suffix*.")
    draft_parallel: int = parallel_knob("tokens of the draft", "the draft's side in tokens",
        "In half precision, it gives a different draft from the same distribution. On the demo at *tau* 0, 8 takes "
        "about 28 passes in all instead of 65.",
        "identical draft in fp32")
    entropy_temperature: float = entropy_temperature_knob("token")

    def exact(self, side: int) -> bool:
        in_order = not self.resample_window or self.resample_order == ONE_BY_ONE
        return self.tau > 1 and not self.acceptance_target and in_order


def rows_at_once(settings: MuLoSDSettings, small: int) -> int:
    """Rows that the draft model writes at once, of a draft of ``small`` rows."""
    return min(settings.draft_rows or small, small)


def neighbours_of(settings: MuLoSDSettings, codes: int) -> int:
    """Number of neighbours for a codebook of ``codes``; None keeps LANTERN's share of the codebook."""
    if settings.neighbours is not None:
        return settings.neighbours

    return round(codes * PUBLISHED_NEIGHBOURS / PUBLISHED_CODES)
