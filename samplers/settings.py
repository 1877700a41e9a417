"""Settings of the samplers: frozen dataclasses whose fields carry default, range, step, unit, symbol and one sentence.

Node widgets, command-line options, range checks and the reference page are all derived from these fields, so a number
stands in one place. Field order is widget order: fields are only ever appended.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from ..errors import UserError

S = TypeVar("S")


@dataclass(frozen=True)
class Knob:
    """What a person should know about one setting.

    Attributes:
        help: one or two plain sentences: what it is, what happens when it goes up, a usual value, the exact value.
        low, high, step: range (inclusive) and widget step; None for choices and switches.
        choices: allowed strings, or empty.
        symbol: the paper's symbol, or "".
        unit: unit, or "".
        advanced: hidden among the advanced widgets.
    """

    help: str
    low: float | None = None
    high: float | None = None
    step: float | None = None
    choices: tuple[str, ...] = ()
    symbol: str = ""
    unit: str = ""
    advanced: bool = False

    @property
    def tooltip(self) -> str:
        """The sentence with the symbol in front."""
        return f"{self.symbol}: {self.help}" if self.symbol else self.help


def knob(default: Any, help: str, **about: Any) -> Any:
    """A dataclass field with its :class:`Knob`."""
    return field(default=default, metadata={"knob": Knob(help, **about)})


def knobs(settings: type | object) -> dict[str, tuple[Any, Knob]]:
    """Field name to (default, knob), in widget order."""
    return {f.name: (f.default, f.metadata["knob"]) for f in fields(settings)}  # type: ignore[arg-type]


def make(kind: type[S], values: Mapping[str, Any]) -> S:
    """Settings of ``kind`` from names and values (numbers, or text from a command line), checked.

    Raises:
        UserError: an unknown name, a wrong type, a number outside its range or not finite, an unknown choice.
    """
    known = knobs(kind)
    clean: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            raise UserError(f"{name}: no such setting; there are {', '.join(known)}.")
        clean[name] = _clean(name, value, *known[name])
    return kind(**clean)


def _clean(name: str, value: Any, default: Any, about: Knob) -> Any:
    if about.choices:
        if value not in about.choices:
            raise UserError(f"{name}: {value!r} is not one of {', '.join(about.choices)}.")
        return value
    if isinstance(default, bool):
        if isinstance(value, bool):
            return value
        if str(value).lower() in ("true", "yes", "on", "1", "false", "no", "off", "0"):
            return str(value).lower() in ("true", "yes", "on", "1")
        raise UserError(f"{name}: {value!r} is neither true nor false.")
    try:
        number = float(value)
        whole = int(number) if math.isfinite(number) else 0
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{name}: {value!r} is not a number.") from None
    if not math.isfinite(number):
        raise UserError(f"{name}: {value!r} is not a finite number.")
    if isinstance(default, int):
        if number != whole:
            raise UserError(f"{name}: {value!r} is not a whole number.")
        number = whole
    low, high = about.low, about.high
    if low is not None and number < low or high is not None and number > high:
        raise UserError(f"{name}: {number:g} is outside {low:g} to {high:g}.")
    return number


@dataclass(frozen=True)
class MARSettings:
    """Plain MAR (Li et al. 2024)."""

    ar_steps: int = knob(
        64, "How many AR steps decide the picture's tokens; more is slower and finer. Usual: 64 for full-size models, "
        "16 to 64 for the demo; never more than the picture has tokens.", low=1, high=4096, step=1, symbol="num_iter",
    )  # fmt: skip
    diffusion_steps: int = knob(
        100, "Denoising steps of every token; more is slower and cleaner. Usual: 100. Below about 30 use t_max 950.",
        low=1, high=1000, step=1, symbol="T",
    )  # fmt: skip
    cfg: float = knob(
        3.0, "Guidance towards the class; higher is more typical and less varied. Usual: 2.9 to 3.3. "
        "At 1 there is no guidance and half the work.", low=1.0, high=20.0, step=0.1, symbol="cfg scale",
    )  # fmt: skip
    cfg_schedule: str = knob(
        "linear", "linear: guidance grows from 1 to cfg as tokens are decided (the paper's); constant: cfg from the start.",
        choices=("linear", "constant"), advanced=True,
    )  # fmt: skip
    temperature: float = knob(
        1.0, "Scale of the noise added at every diffusion step; lower is smoother and less varied. Usual: 1.",
        low=0.0, high=2.0, step=0.01, symbol="temperature", advanced=True,
    )  # fmt: skip
    order: str = knob(
        "random", "The order in which tokens are decided. random: a new one for every image (what MAR was trained on); "
        "raster: row by row.", choices=("random", "raster"), advanced=True,
    )  # fmt: skip
    t_max: int = knob(
        0, "Highest diffusion timestep. 0 takes the checkpoint's own (999 officially, 950 for the demo). Few steps or "
        "half precision from 999 blow single patches up; 950 prevents it.", low=0, high=999, step=1, advanced=True,
    )  # fmt: skip


@dataclass(frozen=True)
class FastHybridSettings(MARSettings):
    """FastHybrid (CVPR 2026): lookahead drafts, verification by similarity, guided few-step refinement."""

    lookahead: int = knob(
        8, "AR steps drafted together; more means fewer full diffusion passes and staler drafts. Usual: 7 to 9 for 64 "
        "steps. 0 turns FastHybrid off: plain MAR, exactly.", low=0, high=256, step=1, symbol="k",
    )  # fmt: skip
    threshold: float = knob(
        0.8, "Least cosine similarity between a draft's condition and the real one; higher rejects more drafts, slower "
        "and closer to plain MAR. Usual: 0.8 at full size, 0.9 to 0.99 on the demo. Above 1 every draft is redone in full: plain MAR.",
        low=-1.0, high=1.01, step=0.01, symbol="lambda",
    )  # fmt: skip
    guided_steps: int = knob(
        10, "Denoising steps of an accepted token, guided by its draft; more is slower and finer. Usual: 10.",
        low=1, high=1000, step=1, symbol="T_g",
    )  # fmt: skip
    guidance_schedule: str = knob(
        "cos", "How the draft's pull fades over the guided steps. cos: the paper's; linear-down: fades evenly; square: "
        "fades fast at first; linear-up: grows (the paper finds it worse); none: no pull, only few steps.",
        choices=("cos", "linear-down", "linear-up", "square", "none"), advanced=True,
    )  # fmt: skip
    guidance_space: str = knob(
        "mean", "What is mixed with the draft. mean: the step's mean (the paper's formula); x0: the predicted clean "
        "token, which keeps the noise level consistent.", choices=("mean", "x0"), advanced=True,
    )  # fmt: skip
    similarity: str = knob(
        "condition", "What is compared. condition: z as the head sees it; without position: z less its position "
        "vector, which every draft shares and which makes all similarities look higher.",
        choices=("condition", "without position"), advanced=True,
    )  # fmt: skip
    accepted: str = knob(
        "refine", "What becomes of an accepted draft. refine: guided diffusion (the paper's RG); keep: it is the token "
        "(the paper's R: faster, texture artefacts).", choices=("refine", "keep"), advanced=True,
    )  # fmt: skip
    verify: str = knob(
        "token", "token: only the tokens below the threshold are redone; step: one of them makes its image redo all "
        "tokens of the AR step.", choices=("token", "step"), advanced=True,
    )  # fmt: skip
