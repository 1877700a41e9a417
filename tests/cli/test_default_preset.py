"""The preset of a run that names none."""

import pytest
from fastar_nodes.cli.planning import plan
from fastar_nodes.samplers.mar.fasthybrid.settings import FastHybridSettings
from fastar_nodes.samplers.mar.settings import MARSettings


@pytest.mark.parametrize(
    ("sets", "wanted"),
    [
        # The demo's balanced values, as README and the node show them.
        ([], {"lookahead": 8, "threshold": 0.99, "guided_steps": 5, "lookahead_start": 4}),
        (
            ["fasthybrid.threshold=0.5", "steps=12"],
            {"lookahead": 8, "threshold": 0.5, "guided_steps": 5, "lookahead_start": 4, "steps": 12},
        ),
        (["preset=fast"], {"lookahead": 8, "threshold": 0.95, "guided_steps": 5, "lookahead_start": 2}),
        (["preset=custom"], {}),
    ],
)
def test_an_accelerator_runs_balanced_unless_another_preset_is_asked_for(sets, wanted):
    (planned,) = plan("fasthybrid", sets, {})
    assert planned.settings == FastHybridSettings(**wanted)


def test_a_plain_sampler_has_no_preset():
    (planned,) = plan("mar", [], {})
    assert planned.settings == MARSettings()
