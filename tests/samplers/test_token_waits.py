"""How often the host waits for the device in a pass of the token samplers, counted with ``waits.py``."""

from collections import Counter

import pytest
import test_token_contract as tokens
from fastar_nodes.runs.registry import SAMPLERS
from small_settings import TOKENS
from waits import counted_waits, moved, waits_of_steps

PASSES = (*(name for name in TOKENS if not SAMPLERS[name].needs_draft), "zipar, blanks", "prompt", "images, llamagen")
WINDOWS = ("window, zipar, text", "window, guided at first", "prompt, window", "images, window")
MULOSD = "mulosd, rows in windows"


def waits_of(name: str) -> list[Counter[str]]:
    """What the host waited for before every step of a case; the last entry is what came after the last step."""
    with counted_waits() as waits:
        found, _ = waits_of_steps(tokens.start(name, move=moved), waits)
    return found


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.fast_cases(*TOKENS)
def test_a_pass_waits_for_nothing(name):
    middle = waits_of(name)[1:-1]
    assert len(middle) > 4
    assert not any(middle), f"a pass of {name} waits for the device at {middle}; leave the values on it"


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.fast_cases(1)
def test_a_window_waits_once_for_what_became_certain(name):
    """Also where an image is finished and leaves the batch."""
    middle = waits_of(name)[1:-1]
    assert len(middle) > 4 and [waits.total() for waits in middle] == [1] * len(middle), middle
    (line,) = set().union(*middle)
    assert "jacobi_window.py" in line


@pytest.mark.slow
def test_mulosd_waits_for_its_rejections_and_for_the_check_of_pixels():
    """Three blocks are enlarged and judged, and all but the last reduced; calls of a draft in windows wait once."""
    middle = waits_of(MULOSD)[1:-1]
    by_file = Counter()
    for waits in middle:
        for line, count in waits.items():
            by_file[line.split("/")[-1].split(":")[0]] += count
    windows = by_file.pop("jacobi_window.py")
    # The window behind the first step is in the setup.
    assert windows <= tokens.whole(MULOSD)[1].report.counts["draft_passes"]
    assert by_file == {"verification.py": 3, "drafting.py": 3 + 2}
