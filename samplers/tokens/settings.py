"""Settings of the samplers of discrete tokens, and the published values that replace None.

The file has, in this order:

1. settings that several samplers have, as functions: each sampler calls them with texts of its own;
2. :class:`TokenSettings`: the settings that all samplers have;
3. the settings of LlamaGen, and of image editing with Janus-4o. The other samplers have their settings in their files;
4. :func:`sampling_of`, from the settings to a :class:`TokenSampling`: how the tokens of one model are sampled.

``samplers/settings.py`` explains the metadata of a field.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ...errors import UserError
from ...networks.llama import TokenModel
from ...reports.record import Report
from ..conditioning import USUAL_FREEDOM
from ..settings import Guarantees, Settings, knob
from .schedule import Schedule, raster

# In each field: first the default and the tooltip, then the range.
# fmt: off

# ------------------------------------------------------------ settings that several samplers have

# Each of these functions puts the sampler's texts into a tooltip. For example, this is the tooltip of
# parallel_knob("tokens that are guessed ahead", USUAL_PARALLEL):
#
#     Number of tokens that are guessed ahead. One pass verifies all guesses, so fewer passes are needed; in fp32, the
#     image stays identical. Usual: the image's side in tokens (16 for 256 pixels); at 0, no guesses are made.


def top_p_knob(advanced: bool) -> Any:
    """The setting *top_p*. ``advanced``: whether *top_p* is hidden among the advanced settings; False for a sampler if
    *top_p* is one of the first settings that its users try.
    """
    return knob(1.0,
        "Sample only from the likeliest values whose probabilities add up to this number; lower is cleaner and less "
        "varied. Usual: 1, which allows all values.",
        low=0.0, high=1.0, step=0.01, advanced=advanced,
        more="For the demo, use 0.8 to 0.95.")


def cfg_knob(
    usual: str,
    more: str = "For the demo, use 1.1 to 1.5. With class labels, 1.5 to 2 gives more variety than the usual 4.",
) -> Any:
    """The setting *cfg*, the strength of guidance.

    Args:
        usual: the usual values for the sampler's models, in words.
        more: what the help page adds to the tooltip.
    """
    return knob(None,
        f"How closely the image follows the condition; higher is more typical and less varied. Usual: {usual}; at 1, "
        "guidance is off, which halves the work.",
        low=1.0, high=20.0, step=0.05, full_size_value=4.0, more=more)


def top_k_knob(
    usual: str,
    more: str = "At 1, the sampler always takes the likeliest value.",
) -> Any:
    """The setting *top_k*. For the arguments see :func:`cfg_knob`."""
    return knob(None,
        "Sample only from this many of the likeliest values of a token; fewer values make the image cleaner and less "
        f"varied. Usual: {usual}; 0 allows all values.",
        low=0, high=65536, step=1, full_size_value=2000, more=more)


def parallel_knob(what: str, usual: str, *, more: str = "", same: str = "in fp32, the image stays identical") -> Any:
    """The setting *parallel*, for Jacobi decoding (``jacobi.py``).

    Args:
        what: what the setting counts, for example "tokens that are guessed ahead".
        usual: the usual value, in words.
        more: what the help page adds to the tooltip.
        same: a clause that says what the guesses do not change.
    """
    return knob(0,
        f"Number of {what}. One pass verifies all guesses, so fewer passes are needed; {same}. Usual: {usual}; at 0, "
        "no guesses are made.",
        low=0, high=4096, step=1, advanced=True, more=more)


def entropy_temperature_knob(what: str) -> Any:
    """The setting *entropy_temperature*, see :func:`.sampling.entropy_factor`. ``what``: what the sampler samples,
    "token" or "code".
    """
    return knob(0.0,
        f"Raises the temperature where the model is certain of a {what}, and lowers the temperature where the model is "
        f"uncertain; a higher value strengthens the effect. Usual: 0, which uses the same temperature for every "
        f"{what}; 1 is the published strength.",
        low=0.0, high=1.0, step=0.05, advanced=True,
        more="Areas with little detail get more variety. On the demo, use this setting only with a lower "
            "*temperature*; see docs/benchmarks.md in the repository.")


# The help pages' text that says which values of "parallel" give the same image.
PARALLEL_SAME = (
    "In half precision, all values from 1 to the number of tokens along one side of the image give the same image. At "
    "other values, the image may be different, but it is sampled from the same distribution."
)
# The usual value of "parallel", in words.
USUAL_PARALLEL = "the image's side in tokens (16 for 256 pixels)"


def why_only_one_per_pass(report: Report) -> str:
    """A sentence that says that every pass decided only one token; "" if the passes decided more than one token on
    average.
    """
    per_pass = report.tokens_per_pass
    # per_pass is 0 only if an edit keeps all tokens; then there is nothing to explain.
    if per_pass is not None and 0 < per_pass <= 1:
        return "Every pass decided only one token, as without acceleration."
    return ""


# ------------------------------------------------------------ all samplers


@dataclass(frozen=True)
class TokenSettings(Guarantees):
    """The settings that all samplers of discrete tokens have: how each token is sampled."""

    cfg: float | None = cfg_knob(
        "4 for class labels and for Tar, 5 for Janus, 7.5 for LlamaGen's text-to-image models")
    temperature: float = knob(1.0,
        "Randomness of every token; lower is safer and less varied. Usual: 1; at 0, the sampler always takes the "
        "likeliest value.",
        low=0.0, high=2.0, step=0.01)
    top_k: int | None = top_k_knob(
        "2000 for class labels, 1000 for LlamaGen's text-to-image models, and 0 for Tar and Janus")
    top_p: float = top_p_knob(advanced=True)
    cfg_interval: int | None = knob(None,
        "Guidance ends after this decoding step, counted from 0; every step without guidance takes half the work. "
        "Usual: the number of tokens of the image or more, so guidance never ends.",
        low=0, high=65536, step=1, full_size_value=4096, advanced=True)

    # This is not a field, because a saved workflow stores the values of widgets in the order of the fields, and
    # inherited fields come first. A new field here would shift all values after it. Every sampler therefore declares
    # the field itself, as its last field. The value here is for TokenSettings itself, which has no such field.
    entropy_temperature = 0.0

    def schedule(self, model: TokenModel) -> Schedule:
        """The passes in which a sampler with these settings decides the tokens of an image.

        Raises:
            UserError: the settings do not fit the model.
        """
        return raster(model.grid)


# ------------------------------------------------------------ LlamaGen


@dataclass(frozen=True)
class LlamaGenSettings(TokenSettings):
    """Settings of LlamaGen, which decides one token after another, row by row."""

    top_p: float = top_p_knob(advanced=False)
    parallel: int = parallel_knob("tokens that are guessed ahead", USUAL_PARALLEL, more=PARALLEL_SAME)
    entropy_temperature: float = entropy_temperature_knob("token")

    def no_gain(self, report: Report) -> str:
        return why_only_one_per_pass(report) if self.parallel > 1 else ""


# ------------------------------------------------------------ image editing

LARGEST_FREEDOM = 10.0


@dataclass(frozen=True)
class EditSettings(Settings):
    """Settings of image editing with Janus-4o."""

    freedom: float = knob(USUAL_FREEDOM,
        "How freely the model may change the image; at a higher value, the pixels change more, and only the content of "
        "the image is kept. Usual: 5, as published; at 0, the result stays closest to the pixels, and a third of the "
        "work is saved.",
        low=0.0, high=LARGEST_FREEDOM, step=0.1, symbol="w",
        more="Only Janus-4o uses this setting; for NextStep, set *cfg_img* of NextStep Sampler. With Janus-4o, "
            "guidance runs the model on three versions of the condition, and combines the outputs. The first version "
            "has the content and the VQ tokens of the image (weight 1). The second version has only the content "
            "(weight *freedom*). Guidance moves the result away from the third version, which is empty. *cfg* of the "
            "sampler sets the strength of guidance; the published value is 5.")


# fmt: on
# ------------------------------------------------------------ from settings to sampling: published values


@dataclass(frozen=True)
class TokenSampling:
    """How the tokens of one model are sampled: the values of :class:`TokenSettings`, but the model's published values
    replace None; see :func:`sampling_of`. The defaults sample from the model's own distribution, without guidance.
    """

    cfg: float = 1.0  # guidance scale; at 1, there is no guidance
    temperature: float = 1.0  # at 0, the sampler takes the likeliest value
    top_k: int = 0  # 0 allows all values
    top_p: float = 1.0  # 1 allows all values
    cfg_interval: float = math.inf  # the last cfg_step with guidance, see Pass; infinite: guidance never ends
    entropy_temperature: float = 0.0  # at 0, all tokens have the same temperature

    @property
    def uses_guidance(self) -> bool:
        """Whether guidance is on. The transformer then also reads the null condition."""
        return self.cfg > 1

    def in_cfg_interval(self, cfg_step: Any) -> Any:
        """Whether guidance, if it is on, applies at a ``cfg_step`` (see :class:`.Pass`): a bool for an int, and a bool
        tensor for an int64 tensor.
        """
        return cfg_step <= self.cfg_interval


# Published cfg and top_k for each kind of condition. A top_k of 0 allows all values of a token.
_PUBLISHED = {
    "class": (4.0, 2000),  # LlamaGen with class labels
    "text": (7.5, 1000),  # LlamaGen with text
    "features": (4.0, 0),  # Tar's de-tokenizer
    "prompt": (5.0, 0),  # Janus
}
# PAR's published cfg for each pair (network width, number of regions). PAR's top_k is 0.
_PUBLISHED_PAR = {
    (1280, 4): 1.5,  # PAR-XL-4x
    (1536, 4): 1.435,  # PAR-XXL-4x
    (3200, 4): 1.345,  # PAR-3B-4x
    (3200, 16): 1.5,  # PAR-3B-16x
}


def published(model: TokenModel) -> dict[str, Any]:
    """Published "cfg" and "top_k" of a model. The values of a published PAR model depend on its width and its number of
    regions. The values of any other model depend on its kind of condition. If the model was trained without a null
    class, "cfg" is 1, so guidance is off.
    """
    c = model.net.config
    cfg, top_k = _PUBLISHED[c.condition]
    if (c.dim, c.regions) in _PUBLISHED_PAR:
        cfg = _PUBLISHED_PAR[c.dim, c.regions]
        top_k = 0
    if not c.null:
        cfg = 1.0
    return {"cfg": cfg, "top_k": top_k}


def sampling_of(settings: TokenSettings, model: TokenModel) -> TokenSampling:
    """How a model's tokens are sampled with these settings. The model's published values replace None.

    Raises:
        UserError: the settings need guidance, but the model was trained without a null class.
    """
    published_values = published(model)
    cfg = published_values["cfg"] if settings.cfg is None else settings.cfg
    if cfg > 1 and not model.net.config.null:
        raise UserError(f"cfg: {model.name} was trained without a null class, so guidance is impossible; set cfg to 1.")

    return TokenSampling(
        cfg=cfg,
        temperature=settings.temperature,
        top_k=published_values["top_k"] if settings.top_k is None else settings.top_k,
        top_p=settings.top_p,
        cfg_interval=math.inf if settings.cfg_interval is None else settings.cfg_interval,
        entropy_temperature=settings.entropy_temperature,
    )
