"""What a new sampler brings along that the registry does not know; "A new sampler" in CONTRIBUTING names it too."""

import inspect

import pytest
from fastar_nodes.runs import advice
from fastar_nodes.runs.registry import SAMPLERS, TAR
from small_settings import BLOCKS, CONTINUOUS, MASKED, SMALL, TOKENS


def test_every_sampler_has_a_record_of_small_settings() -> None:
    missing = ", ".join(name for name in SAMPLERS if "+" not in name and name not in (*SMALL, TAR))
    assert not missing, (
        f"SMALL in tests/lib/small_settings.py lacks {missing}; add settings at which every part of the method works "
        "on 4 x 4 tokens, or {} if its defaults do."
    )
    assert {*MASKED, *TOKENS, *BLOCKS, *CONTINUOUS, TAR} == {*SAMPLERS}


def test_the_advisor_tries_every_sampler() -> None:
    """In its presets or in a line of its own. Combinations may be left out."""
    plain = [name for name, entry in SAMPLERS.items() if entry.baseline]
    tried = {choice.entry.name for name in (*plain, "par") for choice in advice.candidates(name, draft=True)}
    missing = ", ".join(n for n, entry in SAMPLERS.items() if not entry.baseline and "+" not in n and n not in tried)
    assert not missing, (
        f"the Advisor never tries {missing}; add presets in runs/presets.py, or a line of _MORE in runs/advice.py."
    )


@pytest.mark.parametrize("name", [name for name in SAMPLERS if "+" not in name])
def test_declared_caches_are_arguments(name: str) -> None:
    """A node has the *cache* input for what its entry declares, and a run is then given these arguments."""
    entry = SAMPLERS[name]
    takes = {argument for argument in inspect.signature(entry.run).parameters if argument.startswith("make_")}
    assert set(entry.caches) == takes, (
        f"the entry of {name} in runs/registry.py declares caches={entry.caches}, and its function takes "
        f"{sorted(takes)}; declare what it takes, or nothing if LazyMAR's caches cannot be used with it."
    )
    combined = "lazymar" if entry.baseline else f"{name}+lazymar"
    assert combined in SAMPLERS or not entry.caches
