"""Every list to which a new sampler is added holds all samplers; "A new sampler" in CONTRIBUTING names these lists."""

import inspect
import json
from collections.abc import Iterable

import pytest
import test_block_contract as blocks
import test_sampler_contract as masked
import test_speed
import test_token_contract as tokens
import test_token_waits
import test_waits
from fastar_nodes.runs import advice
from fastar_nodes.runs.choice import parse_choice
from fastar_nodes.runs.registry import BITDANCE, MAR, SAMPLERS
from sampler_nodes import SAMPLER_NODES

MASKED = {name for name, entry in SAMPLERS.items() if entry.family.name == MAR}
BLOCKS = {name for name, entry in SAMPLERS.items() if entry.family.name == BITDANCE}
TOKENS = set(SAMPLERS) - MASKED - BLOCKS


def holds_all(place: str, functions: Iterable[object], wanted: Iterable[str]) -> None:
    """Fail with a sentence unless the function of every wanted sampler is among ``functions``."""
    listed = list(functions)
    missing = [name for name in wanted if SAMPLERS[name].run not in listed]
    assert not missing, f"{place} lacks {', '.join(missing)}; add a case of it."


def test_the_contracts() -> None:
    holds_all("CASES in tests/samplers/test_sampler_contract.py", (case[0] for case in masked.CASES.values()), MASKED)
    holds_all("CASES in tests/samplers/test_token_contract.py", (case[0] for case in tokens.CASES.values()), TOKENS)
    place = "CASES in tests/samplers/test_block_contract.py"
    holds_all(place, (case[0] for case in blocks.CASES.values()), BLOCKS)
    settings = {(case[0], type(case[2])) for case in tokens.CASES.values()}
    other = [name for name in TOKENS if (SAMPLERS[name].run, SAMPLERS[name].settings) not in settings]
    assert not other, (
        f"CASES in tests/samplers/test_token_contract.py runs {', '.join(other)} with other settings only."
    )


def test_what_waits() -> None:
    functions = (masked.CASES[name][0] for name in test_waits.MOST)
    holds_all("MOST in tests/samplers/test_waits.py", functions, MASKED)
    functions = (tokens.CASES[name][0] for name in test_token_waits.NAMES)
    holds_all("NAMES in tests/samplers/test_token_waits.py", functions, TOKENS)


def test_what_is_compiled() -> None:
    cases = masked.CASES | tokens.CASES | blocks.CASES
    holds_all("NAMES in tests/samplers/test_speed.py", (cases[name][0] for name in test_speed.NAMES), SAMPLERS)


def test_what_the_advisor_tries() -> None:
    """Every baseline has lines, and every other sampler is in one of them. Combinations may be left out."""
    place = "_CANDIDATES in runs/advice.py"
    for baseline, entry in SAMPLERS.items():
        if not entry.baseline:
            continue
        assert baseline in advice._CANDIDATES, f"{place} lacks the baseline {baseline}; add what is tried beside it."

    tried = {name: {parse_choice(line, "x").entry.name for line in lines} for name, lines in advice._CANDIDATES.items()}
    for name, entry in SAMPLERS.items():
        if not entry.baseline and "+" not in name:
            assert any(name in names for names in tried.values()), f"{place} lacks {name}; add a line of it."


def test_what_is_recorded(root) -> None:
    recorded = json.loads((root / "tests" / "recorded_values.json").read_text(encoding="utf-8"))["samplers"]
    missing = ", ".join(sorted(set(SAMPLERS) - set(recorded)))
    assert not missing, (
        f'"samplers" in tests/recorded_values.json lacks {missing}; run python tests/test_recorded_values.py.'
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


def test_the_lists_of_a_real_comfyui(root) -> None:
    """They hold what a sampler's node is connected with, which the registry does not know."""
    for name in ("test_condition_types.py", "test_fill_in.py", "test_mistakes.py"):
        text = (root / "tests" / "comfyui" / name).read_text(encoding="utf-8")
        missing = ", ".join(node for node in SAMPLER_NODES if f'"{node}"' not in text)
        assert not missing, f"tests/comfyui/{name} lacks {missing}; add it to the list at its top."


def test_the_nodes_have_the_ids_of_the_registry(root) -> None:
    recorded = json.loads((root / "tests" / "nodes" / "schemas.json").read_text(encoding="utf-8"))
    assert set(SAMPLER_NODES) <= set(recorded)
