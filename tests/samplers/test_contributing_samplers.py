"""The two samplers in CONTRIBUTING, "A new sampler", run as they stand there."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import test_sampler_contract as masked
import test_token_contract as tokens
import torch
from fastar_nodes.networks.torch_state import in_own_state
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.mar import canvas, mar, prepare
from fastar_nodes.samplers.mar.settings import MARSettings
from fastar_nodes.samplers.noise import PairedNoise
from fastar_nodes.samplers.settings import knob
from fastar_nodes.samplers.tokens import checks, decode, llamagen, schedule, settings
from fastar_nodes.samplers.tokens.token_noise import TokenNoise
from tokens_reference import condition_of

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## A new sampler\n")[2].partition("\n## ")[0]
OF_TOKENS, OF_MAR = (dedent(code) for code in re.findall(r"```python\n(.*?)```", SECTION, re.S))


def run(code: str, *modules: Any, **more: Any) -> dict[str, Any]:
    """The names that a piece of code defines, with those of modules in it."""
    names: dict[str, Any] = {"Callable": Callable, "partial": partial, "knob": knob, "dataclass": dataclass}
    names |= {"in_own_state": in_own_state, "torch": torch}
    for module in modules:
        names |= vars(module)
    names |= more
    exec(compile("from __future__ import annotations\n" + code, "CONTRIBUTING.md", "exec"), names)  # noqa: S102
    return names


def test_the_schedule_of_tokens():
    made = run(OF_TOKENS, schedule, settings, checks, decode)
    rows, kind = made["my_rows"], made["MyRowsSettings"]
    condition, noise = condition_of("class", (0, 1)), TokenNoise(5, (0, 1))
    few = {"cfg": 2.5, "top_k": 8}

    plain = finish(llamagen.llamagen(tokens.PLAIN, condition, settings.LlamaGenSettings(**few), noise))
    exact, fast = (finish(rows(tokens.PLAIN, condition, kind(**few, cells=cells), noise)) for cells in (1, 3))
    assert torch.equal(exact.latents, plain.latents) and kind(cells=1).exact(4) and not kind(cells=3).exact(4)
    assert not torch.equal(fast.latents, plain.latents) and fast.report.sampler == "my_rows"
    assert fast.report.counts["transformer_passes"] == 6, "16 cells, 3 in a pass"


def test_the_order_of_masked_tokens():
    made = run(OF_MAR, canvas, mar, prepare, MARSettings=MARSettings, math=math)
    middle, kind = made["my_middle"], made["MyMiddleSettings"]
    condition, noise = from_ids((1, 4)), PairedNoise(5, (0, 1))

    plain = finish(mar.mar(masked.MODEL, condition, MARSettings(**masked.FEW), noise))
    exact, framed = (finish(middle(masked.MODEL, condition, kind(**masked.FEW, margin=n), noise)) for n in (0, 1))
    assert torch.equal(exact.latents, plain.latents)

    when = framed.report.maps["step"]
    assert when[:, 1:-1, 1:-1].max() <= when[:, 0].min() and (when != plain.report.maps["step"]).any()
    masked.expect_equations(kind(**masked.FEW, margin=1), framed, labels=(1, 4))
