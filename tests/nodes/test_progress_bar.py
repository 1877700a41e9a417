"""The progress bar of nodes that run a sampler several times: one bar over all runs, which never falls."""

from types import SimpleNamespace

import fake_comfy
import pytest
from fake_comfy import Progress
from fastar_nodes.nodes import preview
from fastar_nodes.nodes.advisor import Advisor
from fastar_nodes.nodes.sweep import SweepNode
from tiny import a_block, a_nextstep, subjects

FEW = "diffusion_steps=2, cfg_schedule=constant"
# Samplers whose steps are many in one image, with their models.
MODELS = {"bitdance": a_block, "nextstep": a_nextstep}


@pytest.fixture(params=MODELS)
def sampler(request):
    return request.param


def test_a_bar_over_runs_never_falls():
    bar = preview.Bar()
    bar.begin(0, 2)
    bar.update(1, 4)
    bar.update(4, 4)
    bar.begin(1, 8)  # more runs than expected
    bar.update(1, 2)
    bar.begin(6, 8)
    bar.update(2, 4, "preview")
    assert Progress.updates == [(125, 1000, None), (500, 1000, None), (500, 1000, None), (812, 1000, "preview")]


def shares() -> list[float]:
    """Of all updates but that of the picture which stays at the end."""
    return [done / total for done, total, _ in Progress.updates if total > 1]


def test_the_advisors_bar_runs_over_all_runs(sampler):
    node = type("Executed", (Advisor,), {"hidden": SimpleNamespace(unique_id="5", extra_pnginfo={}, prompt=None)})
    node.execute(MODELS[sampler](), subjects(sampler), 3, measure="PSNR", least_psnr=0.0, repeats=1)
    seen = shares()
    assert seen == sorted(seen) and seen[0] < 0.05 and seen[-1] > 0.9
    assert len(set(seen)) > 20, "the runs' own steps are shown"


def test_a_sweeps_bar_runs_over_all_cells(sampler, tmp_path, monkeypatch):
    monkeypatch.setattr(fake_comfy.state, "folder", tmp_path)
    plan = {"sampler": sampler, "settings": FEW, "x": "cfg", "x_values": "1, 2, 3", "seeds": "3"}
    SweepNode.execute(MODELS[sampler](), subjects(sampler), **plan, y="none", y_values="")
    seen = shares()
    assert seen == sorted(seen) and seen[0] < 0.05 and seen[-1] == 1
    assert {0.25, 0.5, 0.75} <= set(seen), "after each of four runs"
