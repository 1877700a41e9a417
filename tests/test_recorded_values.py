"""Values that images, saved graphs and reports of earlier versions depend on, recorded.

``python tests/test_recorded_values.py`` writes them again, if a change is intended.
"""

import json
import sys
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).with_name("lib")))
    import checkout  # noqa: F401 - makes the package importable

import numpy as np
import torch
from fastar_nodes.networks import hybrid, llama, mar, siglip
from fastar_nodes.reports import maps
from fastar_nodes.runs import presets as preset_values
from fastar_nodes.runs.presets import PRESETS
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.mar import settings as mar_settings
from fastar_nodes.samplers.mar.lazy.schedule import computed_ratios
from fastar_nodes.samplers.mar.lazy.settings import CacheSettings
from fastar_nodes.samplers.noise import CounterRNG, PairedNoise, row_keys
from fastar_nodes.samplers.settings import Settings, knobs
from fastar_nodes.samplers.tokens import settings as token_settings
from fastar_nodes.samplers.tokens.tar import TarPromptSettings
from fastar_nodes.samplers.tokens.token_noise import TokenNoise
from token_numbers import gumbel_of, uniform_of

RECORDED = Path(__file__).with_name("recorded_values.json")


def settings() -> dict[str, Any]:
    """Class and field to the default of settings whose widgets
    show the paper's value; schemas.json has the other defaults.
    """
    classes = {
        f"{name}.{kind.__name__}": kind
        for name, module in (("mar", mar_settings), ("tokens", token_settings))
        for kind in [*vars(module).values(), TarPromptSettings, *(entry.settings for entry in SAMPLERS.values())]
        if is_dataclass(kind) and issubclass(kind, Settings) and kind.__module__.startswith(module.__package__)
    }
    return {
        f"{name}.{field}": default
        for name, kind in sorted(classes.items())
        for field, (default, about) in knobs(kind).items()
        if about.full_size_value is not None
    }


def presets() -> dict[str, Any]:
    """Settings class, size of the model and preset to its values."""
    kinds = dict.fromkeys([*PRESETS, *(e.settings for e in SAMPLERS.values())])
    return {
        f"{kind.__name__}.{'demo' if demo else 'full'}.{name}.{width}.{steps}": chosen
        for kind in kinds
        for demo, width, steps in ((True, 0, 64), (False, 0, 64), (False, 1280, 32), (True, 1280, 32))
        for name in preset_values.names(kind)
        if (chosen := preset_values.values(kind, name, demo, width, steps))
    }


def samplers() -> dict[str, Any]:
    """Sampler to its family, demo files, and what it needs."""
    return {
        name: [{f: e.demos(f) for f in e.families}, e.baseline, e.needs_draft, e.needs_up_sampler, e.settings.__name__]
        for name, e in SAMPLERS.items()
    }


def random_numbers() -> dict[str, Any]:
    """First numbers of every generator, rounded: images of a seed depend on them."""
    noise, draws = PairedNoise(7, (0, 3)), TokenNoise(7, (0, 3))
    rng = CounterRNG(row_keys(noise, "x", 2)[0])
    cells = torch.tensor([0, 5])
    found = {
        "orders": noise.orders(6),
        "first": noise.start_noise("full", 2, 2),
        "steps": noise.step_noise("full", 2, 1, 2),
        "uniform": rng.uniform(3, 1, 3),
        "normal": rng.normal(torch.tensor([3, 4]), 1, 2, 2),
        "draws": uniform_of(draws, "token", cells, 3),
        "gumbel": gumbel_of(draws, "code", cells[None].expand(2, -1), 2),
    }
    return {name: [round(float(n), 4) for n in x.flatten()] for name, x in found.items()}


def others() -> dict[str, Any]:
    """Colours of a numeric map, and LazyMAR's shares of computed rows."""
    shares = {}
    for schedule in ("published", "stretched", "constant"):
        for lowest in (0.05, 0.4):
            found = computed_ratios(CacheSettings(ratio_schedule=schedule, computed_ratio=lowest), 48)
            shares[f"{schedule} {lowest}"] = [round(x, 6) for x in found]
    oklab = maps._LMS_TO_RGB @ ((maps._OKLAB_TO_LMS @ np.array([0.7, 0.1, -0.05])) ** 3)
    heads = {"gpt": llama.OFFICIAL_HEADS, "mar": mar.OFFICIAL_HEADS, "hybrid": hybrid.OFFICIAL_HEADS}
    return {
        "computed ratios": shares,
        "OKLab 0.7 0.1 -0.05": [round(x, 5) for x in oklab],
        "ramp": maps.ramp(np.linspace(0, 1, 9)).tolist(),
        "hues": maps.hues(np.arange(1, 9)).tolist(),
        "outcomes": {str(k): v for k, v in maps.OUTCOMES.items()},
        "attention heads": {**heads, "ta_tok": siglip.HEADS},
        "published guidance": [token_settings._PUBLISHED, [[*k, v] for k, v in token_settings._PUBLISHED_PAR.items()]],
    }


def values() -> dict[str, Any]:
    found = {"settings": settings(), "presets": presets(), "samplers": samplers()}
    return json.loads(json.dumps({**found, "random numbers": random_numbers(), "others": others()}))


def test_values_are_the_recorded_ones():
    recorded, now = json.loads(RECORDED.read_text(encoding="utf-8")), values()
    for group, found in now.items():
        for name in {**found, **recorded[group]}:
            assert found.get(name) == recorded[group].get(name), (
                f'{name} in "{group}" of tests/recorded_values.json is another; '
                "if the change is intended, run python tests/test_recorded_values.py"
            )


if __name__ == "__main__":
    groups = [
        f"{json.dumps(group)}: {{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in found.items()) + "\n}"
        for group, found in values().items()
    ]
    RECORDED.write_text("{\n" + ",\n".join(groups) + "\n}\n", encoding="utf-8")
