"""Settings of the samplers of discrete tokens; see ``samplers/settings.py`` for the metadata of a field."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from ...networks.llama import TokenModel
from ...reports.record import Report
from ..settings import Guarantees, Settings, knob
from .schedule import Schedule, raster

# In each field: first the default and the help sentence, then the range.
# fmt: off

# ------------------------------------------------------------ settings that several samplers have


def top_p_knob(advanced: bool) -> Any:
    """The setting that cuts the tail of a token's distribution. ``advanced``: whether it is an advanced setting; it is
    not in samplers where users try it first.
    """
    return knob(1.0,
        "Sample only from the likeliest values that together reach this probability; lower is cleaner and less "
        "varied. Usual: 1, which allows all values.",
        low=0.0, high=1.0, step=0.01, advanced=advanced,
        more="For the demo, use 0.8.")


def cfg_knob(
    usual: str,
    more: str = "For the demo, use 1.5. With class labels, 1.5 to 2 gives more variety than the usual 4.",
) -> Any:
    """The strength of guidance. ``usual``: its usual values for the models of a sampler; ``more``: the longer text."""
    return knob(None,
        f"How closely the image follows the condition; higher is more typical and less varied. Usual: {usual}; at 1, "
        "guidance is off, which halves the work.",
        low=1.0, high=20.0, step=0.05, paper=4.0, more=more)


def top_k_knob(
    usual: str,
    more: str = "At 1, the sampler always takes the likeliest value. On the demo, a *top_k* of 10 or more changes "
    "nothing, because *top_p* 0.8 leaves fewer than 10 values.",
) -> Any:
    """The setting that keeps a number of values of a token. Arguments as for :func:`cfg_knob`."""
    return knob(None,
        "Sample only from this many of the likeliest values of a token; fewer values make the image cleaner and less "
        f"varied. Usual: {usual}; 0 allows all values.",
        low=0, high=65536, step=1, paper=2000, more=more)


def parallel_knob(what: str, usual: str, more: str = "", same: str = "the image stays identical in fp32") -> Any:
    """The setting of Jacobi decoding: ``what`` it predicts, its usual value, the longer text of its help, and what
    stays the ``same``.
    """
    return knob(0,
        f"Guess this many {what} ahead and verify all guesses in one pass, so fewer passes are needed; {same}. Usual: "
        f"{usual}; at 0, no guesses are made.",
        low=0, high=4096, step=1, advanced=True, more=more)


def entropy_temperature_knob(what: str) -> Any:
    """The setting of the temperature by entropy (``sampling.py``). ``what``: what is sampled, "token" or "code"."""
    return knob(0.0,
        f"Raises the temperature where the model is certain of a {what}, and lowers the temperature where the model is "
        f"uncertain; a higher value strengthens the effect. Usual: 0, which uses the same temperature for every "
        f"{what}; 1 is the published strength.",
        low=0.0, high=1.0, step=0.05, advanced=True,
        more="Areas with little detail get more variety. At 1, *temperature* is multiplied by 2.5 exp(-H / 3) + 0.6, "
            "where H is the entropy in nats of the values that may be sampled. The factor is 3.1 if the model is "
            f"certain of a {what}, and below 1 if the entropy is above 5.5 nats. On the demo, use this setting only "
            "with a lower *temperature*; see docs/benchmarks.md in the repository. The paper has no results for Tar.")


# The longer text of "parallel", if it predicts passes.
PARALLEL_PASSES = (
    "In half precision, all values from 1 to the image's side in tokens give the same image, but 0 gives a different "
    "image from the same distribution."
)
# The usual value of "parallel".
USUAL_PARALLEL = "the image's side in tokens (16 for 256 pixels)"


def one_a_pass(report: Report) -> str:
    """Why a run that should decide several tokens in a pass gained nothing; "" if it decided several."""
    return "Every pass decided only one token, as without acceleration." if (report.tokens_per_pass or 2) <= 1 else ""


# ------------------------------------------------------------ all samplers


@dataclass(frozen=True)
class TokenSettings(Guarantees):
    """Sampling of a token, shared by all samplers of discrete tokens."""

    cfg: float | None = cfg_knob("4 for class labels and for Tar, 5 for Janus, 7.5 for text prompts of a LlamaGen")
    temperature: float = knob(1.0,
        "Randomness of every token; lower is safer and less varied. Usual: 1; at 0, the sampler always takes the "
        "likeliest value.",
        low=0.0, high=2.0, step=0.01)
    top_k: int | None = top_k_knob(
        "2000 for class labels, 1000 for text prompts of a LlamaGen, and 0 for Tar and Janus")
    top_p: float = top_p_knob(advanced=True)
    cfg_interval: int | None = knob(None,
        "Guidance ends after this many decoding steps; without guidance, a step takes half the work. Usual: the number "
        "of tokens of the image or more, which keeps guidance to the end.",
        low=0, high=65536, step=1, paper=4096, advanced=True)

    # No field here, only the value of settings without the field. Every sampler has the setting, and declares it as its
    # last field: a saved workflow stores the values of widgets in their order.
    entropy_temperature = 0.0

    def schedule(self, model: TokenModel) -> Schedule:
        """The passes that decide an image of a model.

        Raises:
            UserError: the settings do not fit the model.
        """
        return raster(model.grid)


@dataclass(frozen=True)
class TokenSampling:
    """How a token of one model is sampled: the numbers of :class:`TokenSettings`, with the model's own values in place
    of None; see :func:`.sampling_of`. The defaults give the model's distribution, without guidance.
    """

    cfg: float = 1.0  # guidance scale; at 1, there is no guidance
    temperature: float = 1.0  # at 0, the likeliest value is taken
    top_k: int = 0  # 0 allows all values
    top_p: float = 1.0  # 1 allows all values
    cfg_interval: float = math.inf  # the last step with guidance; infinite: all steps
    entropy_temperature: float = 0.0  # at 0, all tokens have the same temperature

    @property
    def guides(self) -> bool:
        """Whether guidance is applied, for which the null branch is evaluated."""
        return self.cfg > 1


# ------------------------------------------------------------ LlamaGen


@dataclass(frozen=True)
class LlamaGenSettings(TokenSettings):
    """Plain LlamaGen: one token after another, row by row."""

    top_p: float = top_p_knob(advanced=False)
    parallel: int = parallel_knob("tokens", USUAL_PARALLEL,
        "A pass (one run of the transformer) computes the next tokens from the guesses, and confirms the guesses up "
        "to the first one that differs from the token computed for its position (Jacobi iteration). In half "
        "precision, all values from 1 to the image's side in tokens give the same image, but 0 gives a different "
        "image from the same distribution. To compare images in half precision, use *parallel* 1 instead of 0, or "
        "choose *dtype* fp32 in the loader. On the demo, *parallel* 16 takes 59 passes instead of 256. For a single "
        "image on a GPU, twice the side may be faster still. On a CPU, batches of four or more images hardly get "
        "faster.")
    entropy_temperature: float = entropy_temperature_knob("token")

    def no_gain(self, report: Report) -> str:
        return one_a_pass(report) if self.parallel > 1 else ""


# ------------------------------------------------------------ Tar

DETAILS = ("729", "169", "81")


@dataclass(frozen=True)
class TarPromptSettings(Settings):
    """Tar (Han et al. 2025): from a prompt to the semantic codes of an image."""

    detail: str = knob(
        "729",
        "Number of semantic codes that describe the image; with fewer codes, Tar is faster and the description is "
        "vaguer. Usual: 729, the number with which Tar was trained most often.",
        choices=DETAILS,
        more="The menu offers the numbers of codes that the usual Tar models can write. If the connected model writes "
        "other numbers of codes, the menu shows these numbers instead.")
    temperature: float = knob(1.0,
        "Randomness of every code; lower is safer and less varied. Usual: 1; at 0, the model always takes the "
        "likeliest code.",
        low=0.0, high=2.0, step=0.01)
    top_p: float = knob(0.95,
        "Sample only from the likeliest codes that together reach this probability; lower is safer and less varied. "
        "Usual: 0.95; 1 allows all codes.",
        low=0.0, high=1.0, step=0.01)
    top_k: int = knob(1200,
        "Sample only from this many of the likeliest codes; fewer is safer and less varied. Usual: 1200; at 0, all "
        "codes are allowed, and at 1 the model always takes the likeliest code.",
        low=0, high=65536, step=1)
    repetition_penalty: float | None = knob(None,
        "Makes codes that already occurred less likely; higher repeats less. Usual: the value that the model's file "
        "recommends; at 1, the penalty is off.",
        low=0.01, high=2.0, step=0.01, paper=1.0, advanced=True)
    parallel: int = parallel_knob("codes", "32 on a GPU",
        "In half precision, all values from 1 on give the same codes, but 0 gives different codes from the same "
        "distribution.",
        "the codes stay identical in fp32")
    entropy_temperature: float = entropy_temperature_knob("code")


# ------------------------------------------------------------ MuLo-SD

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

    cfg: float | None = cfg_knob("4 for class labels and for Tar, 7.5 for text prompts of a LlamaGen")
    top_k: int | None = top_k_knob("2000 for class labels, 1000 for text prompts of a LlamaGen, and 0 for Tar")
    tau: float = knob(0.3,
        "Lowest probability at which a draft token is accepted; higher is slower and closer to the image of the large "
        "model. Start with 0.3; at 0, the whole draft is accepted, and above 1 every token is resampled.",
        low=0.0, high=1.01, step=0.01,
        more="The sampler adds up the probability of the draft's code and of similar codes (see *neighbours*). The "
            "right value depends on the models: read *drafts accepted* in the report, then raise or lower *tau*.")
    expansion: int = knob(1,
        "Tokens within this distance of a rejected token are resampled too; a larger distance is slower and hides "
        "seams better. Usual: 1; at 0, only the rejected tokens are resampled.",
        low=0, high=16, step=1, symbol="l", unit="tokens",
        more="In the paper, images are worse with *expansion* 0; on the demo, they are better.")
    acceptance_target: float = knob(0.0,
        "Share of the draft tokens to accept, which replaces tau; higher is faster, and the image is less like the "
        "large model's. Usual: 0.9 to 0.98; at 0, tau decides.",
        low=0.0, high=1.0, step=0.01, advanced=True,
        more="The tokens around a rejected token (see *expansion*) are resampled too. If rejected tokens were spread "
            "at random over a 32 x 32 grid, an *acceptance_target* of 0.7 would resample 95% of all tokens, and an "
            "*acceptance_target* of 0.95 would resample 35%.")
    neighbours: int | None = knob(None,
        "Number of similar codes whose probability is added to the probability of the draft code; with more "
        "neighbours, more of the draft is accepted. Usual: 1000 of 16,384 codes, or the same share of another number "
        "of codes; at 0, tau must be much lower.",
        low=0, high=65536, step=1, paper=PUBLISHED_NEIGHBOURS, symbol="k", advanced=True,
        more="For the demo's 512 codes, this share is 31.")
    draft_rows: int = knob(4,
        "Number of rows of the small image that are drafted before the large model verifies them; the next rows are "
        "drafted from the result, and a smaller number is slower. Usual: 4 to 8 (our choice, because the paper gives "
        "no number); at 0, the whole image is drafted first.",
        low=0, high=256, step=1, advanced=True,
        more="With fewer rows, the sampler also accepts fewer draft tokens, because the last of these rows is enlarged "
            "before the row below it exists.")
    draft_window: int = knob(8,
        "Number of tokens of a row that the draft model decides before it starts the next row; a smaller number is "
        "faster, and the image is less coherent. Usual: 8; at 0, the draft model decides one token after another.",
        low=0, high=256, step=1, advanced=True,
        more="The setting works like *window* of ZipAR Sampler.")
    resample_window: int = knob(8,
        "The same as draft_window, but for the areas that the large model resamples. Usual: 4 to 16; at 0, which is "
        "slower, the tokens of an area are resampled one after another, but separate areas are still resampled at the "
        "same time.",
        low=0, high=256, step=1, advanced=True)
    resample_order: str = knob(AT_ONCE,
        "With islands at once, separate areas are resampled at the same time, as in the paper. one by one is slower: "
        "the sampler then ignores resample_window and resamples one token after another.",
        choices=(AT_ONCE, ONE_BY_ONE), advanced=True)
    repair: str = knob(LOCAL,
        "What is resampled after a rejection. Usual: local, which resamples the area around the rejected token; suffix "
        "resamples every token after the rejected one and is there for comparison, as in the paper.",
        choices=(LOCAL, SUFFIX), advanced=True,
        more="Earlier methods of speculative decoding work like *suffix*.")
    draft_parallel: int = parallel_knob("tokens of the draft", "the draft's side in tokens",
        "In half precision, the draft is a different one from the same distribution. On the demo with *tau* 0, "
        "*draft_parallel* 8 reduces the passes of both models together from 65 to about 28.",
        "the draft stays identical in fp32")
    entropy_temperature: float = entropy_temperature_knob("token")

    def exact(self, side: int) -> bool:
        in_order = not self.resample_window or self.resample_order == ONE_BY_ONE
        return self.tau > 1 and not self.acceptance_target and in_order

    def rows_at_once(self, draft_side: int) -> int:
        """Rows that the draft model generates before the target verifies them, of ``draft_side`` rows in all."""
        return min(self.draft_rows or draft_side, draft_side)

    def neighbours_among(self, codes: int) -> int:
        """Number of neighbours in a codebook of ``codes``; None keeps LANTERN's share of the codebook."""
        if self.neighbours is not None:
            return self.neighbours

        return round(codes * PUBLISHED_NEIGHBOURS / PUBLISHED_CODES)
