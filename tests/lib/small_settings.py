"""One record a sampler: small settings at which every part of its method works on a tiny model. The cases of the tests
that run every sampler come from the registry and from these records.
"""

from typing import Any

from fastar_nodes.runs.registry import BITDANCE, FAMILIES, LLAMAGEN, MAR, NEXTSTEP, SAMPLERS, TAR

# The samplers of each kind; Tar is the second name of LlamaGen.
MASKED, TOKENS, BLOCKS, CONTINUOUS = (
    tuple(name for name, entry in SAMPLERS.items() if entry.family.kind == FAMILIES[family].kind and name != TAR)
    for family in (MAR, LLAMAGEN, BITDANCE, NEXTSTEP)
)

# A method's own settings; what all samplers of a kind have, steps and guidance, is the tests'. A MAR sampler has six AR
# steps and at least four diffusion steps, on 4 x 4 tokens.
SMALL: dict[str, dict[str, Any]] = {
    "mar": {},
    "fasthybrid": {"lookahead": 3, "threshold": 0.97, "guided_steps": 3},
    "lazymar": {
        "refresh_period": 3,
        "start_step": 1,
        "computed_ratio": 0.2,
        "ratio_schedule": "stretched",
    },
    "cspd": {"mode": "lossless", "draft_length": 2},
    "gtr": {"diffusion_steps_end": 4, "reconstruction_steps": 2, "first_share": 0.5, "detail_share": 0.25},
    "llamagen": {},
    "par": {},
    "zipar": {"window": 2},
    "mulosd": {"tau": 0.2, "draft_window": 2, "resample_window": 2},
    "bitdance": {"diffusion_steps": 4, "cfg": 2.0},
    "nextstep": {"diffusion_steps": 3, "cfg": 2.0},
}


def small(name: str) -> dict[str, Any]:
    """Small settings of a sampler, or of a combination of two, "gtr+lazymar"."""
    values: dict[str, Any] = {}
    for part in name.split("+"):
        values |= SMALL.get(part, {})  # test_lists.py asks for the record of a new sampler
    return values
