"""Parity cases of all families: comparison of computed with recorded tensors."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UserError, first_line
from ...model_loaders.mar.loader import load_mar
from ...networks.mar import MARModel
from ...networks.ops import shapes_only

ATOL = 1e-4


@dataclass(frozen=True, eq=False)
class Check:
    """Comparison of a computed with a recorded tensor; ``tolerance`` is the largest allowed absolute difference."""

    computed: Tensor
    expected: Tensor
    tolerance: float = ATOL


@dataclass(frozen=True, eq=False)
class Case:
    """A named group of checks; ``checks`` is None if this version does not implement what they test."""

    name: str
    checks: Callable[[], Iterable[Check]] | None


# File to the files it needs beside it, and what makes its cases.
Known = Mapping[str, tuple[tuple[str, ...], Callable[[Path], Iterable[Case]]]]


@dataclass(frozen=True)
class Outcome:
    """Result of a case: error and tolerance of the worst check, "ok", "FAIL" or "not yet", and the
    reason of a failure.
    """

    name: str
    error: float
    tolerance: float
    verdict: str
    why: str = ""

    @property
    def line(self) -> str:
        """Name, largest absolute error, tolerance and verdict in columns."""
        numbers = ("-", "-") if self.verdict == "not yet" else (f"{self.error:.3e}", f"{self.tolerance:.3e}")
        return f"{self.name:<40}  {numbers[0]:>10}  {numbers[1]:>10}  {self.verdict}"


def relative(computed: Tensor, expected: Tensor, tolerance: float = ATOL) -> Check:
    """A check whose tolerance is relative to the largest recorded value, if that is above 1."""
    return Check(computed, expected, tolerance * max(1.0, float(expected.abs().max())))


def exact(computed: Tensor, expected: Tensor) -> Check:
    """A check with tolerance 0."""
    return Check(computed, expected, 0.0)


def gathered(name: str, make: Callable[[], Iterable[Case]]) -> list[Case]:
    """The cases of a file; one that is damaged or incomplete is one failed case, so that the others run."""
    try:
        return list(make())
    except Exception as e:
        error = e

    def checks() -> Iterable[Check]:
        raise error

    return [Case(name, checks)]


def from_files(folder: Path, known: Known, prefix: str) -> list[Case]:
    """The cases of the files that are in ``folder``; ``prefix``: of the names of failed cases."""

    def of(others: Sequence[str], make: Callable[[Path], Iterable[Case]]) -> Iterable[Case]:
        for name in others:
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{name} is not beside it")
        return make(folder)

    there = [(first, *about) for first, about in known.items() if (folder / first).is_file()]
    cases = (gathered(f"{prefix}/{first.split('.')[0]}", partial(of, *about)) for first, *about in there)
    return [case for part in cases for case in part]


def same_shapes(
    shapes: Mapping[str, Sequence[int]], make: Callable[[dict[str, Tensor]], nn.Module], unread: Collection[str] = ()
) -> Check:
    """Whether a network on the meta device, made from a state dict,
    has the tensors of an official file but the ``unread`` ones.
    """
    with shapes_only():
        net = make({name: torch.empty(tuple(shape)) for name, shape in shapes.items()})
    ours = {(name, *t.shape) for name, t in net.state_dict().items()}
    theirs = {(name, *shape) for name, shape in shapes.items() if name not in unread}
    return exact(torch.tensor(len(ours ^ theirs)), torch.tensor(0))


def judge(case: Case) -> Outcome:
    """Run a case. An exception in its checks is a failure of the case."""
    if case.checks is None:
        return Outcome(case.name, 0.0, 0.0, "not yet")
    worst = Outcome(case.name, 0.0, 0.0, "FAIL", "the file holds nothing to compare")

    try:
        for k, check in enumerate(case.checks()):
            if check.computed.shape != check.expected.shape:
                why = f"shape {list(check.computed.shape)}, recorded {list(check.expected.shape)}"
                return Outcome(case.name, float("inf"), check.tolerance, "FAIL", why)
            gap = (check.computed.double() - check.expected.double()).abs()
            error = float(gap.max()) if gap.numel() else 0.0
            ok = error <= check.tolerance  # False for NaN
            now = Outcome(case.name, error, check.tolerance, "ok" if ok else "FAIL", "" if ok else "the numbers differ")
            if not ok:
                return now
            if k == 0 or error * max(worst.tolerance, 1e-300) >= worst.error * max(check.tolerance, 1e-300):
                worst = now
    except Exception as e:  # damaged case files can raise any exception
        return Outcome(case.name, float("nan"), 0.0, "FAIL", f"{type(e).__name__}: {e}".splitlines()[0])

    return worst


def masked_model(weights: Path, config: Path) -> MARModel:
    """A recorded MAR in fp32, whose tokens are not scaled;
    ``config``: the JSON with its number of heads, if there is one.
    """
    heads = int(read_json(config)["encoder_num_heads"]) if config.is_file() else None
    return replace(load_mar(weights, "fp32", heads=heads), latent_scale=1.0)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a case file; fp16 tensors are converted to fp32. Raises UserError if it is damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(path)
    except SafetensorError as e:
        raise UserError(f"{path.name}: it is damaged ({e}); copy it again.") from None

    return {k: v.float() if v.dtype == torch.float16 else v for k, v in found.items()}


def read_json(path: Path) -> Any:
    """Content of a JSON case file. Raises UserError if it is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"{path.name}: it is not JSON ({first_line(e)}); copy it again.") from None
