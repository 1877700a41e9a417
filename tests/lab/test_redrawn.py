"""How much of a grid is drawn again at a share of kept drafts, by simulation."""

import numpy as np
import pytest
from fastar_nodes.lab.experiments.redrawn import SHARES, neighbours_rejected, redrawn, rejections
from fastar_nodes.runs import presets
from fastar_nodes.samplers.tokens.settings import MuLoSDSettings
from islands_reference import plain_expansion, plain_islands, plain_waves

pytestmark = pytest.mark.slow


def test_a_simulation_equals_plain_loops():
    rejected = rejections(8, 0.9, 0.5, 20)
    cells = [plain_expansion(one, 1) for one in rejected]
    waves = [len(plain_waves(plain_islands(some, 8), 8, 3)) for some in cells]
    again, mean = redrawn(rejected, 1, 3)
    assert again == pytest.approx(np.mean([len(some) / 64 for some in cells])) and mean == np.mean(waves)
    assert (rejected.sum(axis=(1, 2)) == 6).all(), "a tenth of 64 cells in every image"


def test_independent_rejections_by_arithmetic():
    """A cell inside stays if all nine around it are kept: 0.9 ** 9 = 0.39. At the borders and before the first
    rejection more stay.
    """
    again, _ = redrawn(rejections(64, 0.9, 0.0, 50))
    assert again == pytest.approx(1 - 0.9**9, abs=0.02)
    assert neighbours_rejected(rejections(64, 0.9, 0.0, 50)) == pytest.approx(0.1, abs=0.01)


def test_full_size_presets_do_not_draw_nearly_everything_again():
    """Of 32 x 32 tokens: a third and a sixth with independent rejections, fewer in clusters. At 0.7 it was 95 %."""
    former, _ = redrawn(rejections(32, 0.7, 0.0, 50))
    assert former > 0.94
    for name, most in (("balanced", 0.37), ("fast", 0.17)):
        chosen = presets.values(MuLoSDSettings, name, demo=False)
        for smooth in (0.0, 0.5, 1.0):
            rejected = rejections(32, chosen["acceptance_target"], smooth, 50)
            again, waves = redrawn(rejected, chosen["expansion"], chosen["resample_window"])
            assert 0.05 < again < most and waves < 100, (name, smooth)


def test_the_command_prints_every_share(lab):
    assert len(lab("redrawn --side 8 --images 2").out.splitlines()) == 2 + 3 * len(SHARES)
