"""Seconds begin before the condition is read, in every family."""

import pytest
from block_models import text_bitdance
from fastar_nodes.networks.hybrid import HybridModel
from fastar_nodes.reports import record
from fastar_nodes.samplers.blocks import canvas as block_canvas
from fastar_nodes.samplers.blocks.bitdance import bitdance
from fastar_nodes.samplers.blocks.settings import BlockSettings
from fastar_nodes.samplers.conditioning import PromptCondition
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.mar.cspd import cspd
from fastar_nodes.samplers.mar.cspd.settings import CSpDSettings
from fastar_nodes.samplers.mar.mar import mar
from fastar_nodes.samplers.mar.settings import MARSettings
from fastar_nodes.samplers.nextstep import canvas as nextstep_canvas
from fastar_nodes.samplers.nextstep.nextstep import nextstep
from fastar_nodes.samplers.nextstep.settings import NextStepSettings
from fastar_nodes.samplers.noise import PairedNoise
from fastar_nodes.samplers.tokens import canvas as token_canvas
from fastar_nodes.samplers.tokens import tar as tar_module
from fastar_nodes.samplers.tokens.llamagen import llamagen
from fastar_nodes.samplers.tokens.settings import LlamaGenSettings
from fastar_nodes.samplers.tokens.tar import TarPromptSettings
from fastar_nodes.samplers.tokens.token_noise import TokenNoise
from nextstep_models import tiny_nextstep
from qwen_reference import tiny_tar
from tiny_hybrids import tiny_hybrid
from tokens_reference import condition_of, tiny_gpt

LABELS = condition_of("class")
PROMPT = PromptCondition(("a red house",))
NOISE = PairedNoise(1, (0,))
FEW = {"steps": 4, "diffusion_steps": 2}
BLOCKS = BlockSettings(diffusion_steps=2, width=8, height=8)
DRAWS = TokenNoise(1, range(3))
TAR = TarPromptSettings(detail="81")

# What reads the condition, and the sampler; CSpD's two models both read it.
CASES = {
    "hybrid": (HybridModel, "conditioning", 1, lambda: mar(tiny_hybrid(), PROMPT, MARSettings(**FEW), NOISE)),
    "cspd": (
        HybridModel,
        "conditioning",
        2,
        lambda: cspd(tiny_hybrid(), PROMPT, CSpDSettings(**FEW), NOISE, draft=tiny_hybrid(1)),
    ),
    "llamagen": (
        token_canvas,
        "prepare",
        1,
        lambda: llamagen(tiny_gpt(), condition_of("class"), LlamaGenSettings(), DRAWS),
    ),
    "tar": (tar_module, "pad_entries", 1, lambda: tar_module.tar_prompt(tiny_tar(), ["a cat"] * 3, TAR, DRAWS)),
    "bitdance": (block_canvas, "_inputs", 1, lambda: bitdance(text_bitdance(), PROMPT, BLOCKS, NOISE)),
    "nextstep": (
        *(nextstep_canvas, "branches_for_condition", 1),
        lambda: nextstep(tiny_nextstep(), PROMPT, NextStepSettings(diffusion_steps=2), NOISE),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_reading_the_condition_is_part_of_the_seconds(case, monkeypatch):
    owner, name, models, start = CASES[case]
    now = [0.0]
    monkeypatch.setattr(record.time, "perf_counter", lambda: now[0])
    read = getattr(owner, name)

    def slow(*args, **more):
        now[0] += 10.0
        return read(*args, **more)

    monkeypatch.setattr(owner, name, slow)
    assert finish(start()).report.seconds == 10.0 * models
