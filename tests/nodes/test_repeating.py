"""A run repeats from its own report: saved in a PNG, read by Load Report, drawn by Any Sampler."""

import json

import fake_comfy
import pytest
import torch
from fastar_nodes.nodes import samplers, sharing
from fastar_nodes.reports.exchange import KEY, add_runs, described
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.settings import knobs
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from small_settings import BLOCKS, CONTINUOUS, MASKED, TOKENS, small
from test_samplers import Upscale
from tiny import LABELS, SHORT, a_block, a_drawer, a_gpt, a_mar, a_nextstep, a_prompt, models, node_of, subjects


@pytest.fixture(autouse=True)
def folder(tmp_path):
    fake_comfy.state.folder = tmp_path
    (tmp_path / "input").mkdir()
    return tmp_path


def line_of(report, folder) -> tuple[str, list[str]]:
    """The line for Any Sampler, and what Load Report says, of a run that was saved in a PNG."""
    metadata = {}
    add_runs(metadata, described([report]))
    about = PngInfo()
    about.add_text(KEY, json.dumps(metadata[KEY]))
    Image.new("RGB", (8, 8)).save(folder / "input" / "a.png", pnginfo=about)

    out = sharing.LoadReport.execute("a.png")
    (line,) = out.result[3]
    return line, [text for text in out.ui["fastar_text"] if text]


def cache(**values):
    return samplers.LazyMARCache.execute(preset="custom", **values).result[0]


CACHED = {"refresh_period": 2, "start_step": 1, "head_cache": True}
UNCACHED_HEAD = {"refresh_period": 2, "start_step": 1, "head_cache": False}
CHANGED = {"cfg": 1.7, "temperature": 0.83}


def usual(name):
    """A run of a sampler or combination: its node's sampler and its values."""
    sampler, _, cached = name.partition("+")
    values = {**(SHORT if name in MASKED else {}), **small(sampler)}
    if sampler == "gtr":
        values["steps"] = 5  # three for the structure, and its reconstruction in two
    return sampler, values | ({"cache": CACHED} if cached else {})


# Name of what is reported, to the node's sampler and its values.
RUNS = {name: usual(name) for name in (*MASKED, *TOKENS, *BLOCKS, *CONTINUOUS)}
RUNS["bitdance"] = ("bitdance", {"diffusion_steps": 4, "cfg": 1.5, "width": 8, "height": 8})
RUNS |= {
    "mar, changed": ("mar", {**SHORT, **CHANGED}),
    "mar, annealed": ("mar", {**SHORT, "diffusion_steps_end": 2}),
    "mar, speculation": ("mar", {**SHORT, "speculation": 3}),
    "lazymar, head": ("lazymar", {**SHORT, **CACHED}),
    "lazymar, speculation": ("lazymar", {**SHORT, **UNCACHED_HEAD, "speculation": 3}),
    "cspd, published": ("cspd", {**SHORT, "draft_length": 2, "mode": "published", "alignment": False}),
    "lazymar of MAR Sampler": ("mar", {**SHORT, "cache": CACHED}),
    "lazymar of MAR Sampler, speculation": ("mar", {**SHORT, "speculation": 3, "cache": UNCACHED_HEAD}),
    "cspd+lazymar, speculation": ("cspd", {**SHORT, "mode": "lossless", "cache": UNCACHED_HEAD, "speculation": 3}),
    "cspd+lazymar, published": ("cspd", {**SHORT, "draft_length": 2, "mode": "published", "cache": CACHED}),
    "llamagen, changed": ("llamagen", CHANGED),
    "llamagen, parallel": ("llamagen", {"parallel": 2, "top_k": 5}),
    "par, changed": ("par", {"top_p": 0.7}),
    "mulosd, expansion": ("mulosd", {"tau": 0.3, "expansion": 2}),
    "bitdance, annealed": ("bitdance", {"diffusion_steps": 4, "diffusion_steps_end": 2, "width": 8, "height": 8}),
    "nextstep, changed": ("nextstep", {"diffusion_steps": 4, "cfg_schedule": "rising", "solver": "sde", "width": 16}),
    "nextstep, annealed": ("nextstep", {"diffusion_steps": 4, "diffusion_steps_end": 2, "use_norm": True}),
    "nextstep, speculation": ("nextstep", {"diffusion_steps": 4, "time_shift": 3.2, "speculation": 3}),
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.fast_cases(every=2)
def test_a_run_repeats_from_its_report(name, folder):
    sampler, changes = RUNS[name]
    node = node_of(sampler)
    used = models(node)
    condition = a_prompt() if SAMPLERS[sampler].needs_up_sampler else subjects(sampler)
    given = dict(changes)
    if "cache" in given:
        given["cache"] = cache(**given["cache"])

    latent, report = node.execute(**used, **given, preset="custom", condition=condition, seed=11).result
    line, said = line_of(report, folder)
    draft = used.get("draft")
    model = used.get("target") or used["model"]
    again, repeated = sharing.AnySampler.execute(model, condition, line, 11, draft=draft).result

    assert report.sampler == name.split(",")[0].split(" of ")[0] and said == []
    assert torch.equal(latent["samples"], again["samples"])
    assert (repeated.sampler, repeated.settings, repeated.counts) == (report.sampler, report.settings, report.counts)


# What makes a model with what its file recommends, by sampler.
MAKERS = {"mar": a_mar, "lazymar": a_mar, "llamagen": a_gpt, "bitdance": a_block, "nextstep": a_nextstep}


@pytest.mark.parametrize("sampler", MAKERS)
def test_a_run_repeats_on_a_model_whose_file_recommends_other_settings(sampler, folder):
    """A report holds what was used, and a line overrides what the file says."""
    file = {"steps": 5, "diffusion_steps": 5, "cfg": 4.0, "temperature": 0.5}
    model = MAKERS[sampler](file=file)
    size = ", width=8, height=8" if sampler == "bitdance" else ""
    condition = subjects(sampler)
    latent, report = sharing.AnySampler.execute(model, condition, f"{sampler}: cfg=1.5{size}", 3).result
    assert report.settings["cfg"] == 1.5
    assert report.settings.get("diffusion_steps", 5) == 5, "the file's"

    line, _ = line_of(report, folder)
    again, _ = sharing.AnySampler.execute(model, condition, line, 3).result
    assert torch.equal(latent["samples"], again["samples"])


def test_a_line_that_cannot_repeat_a_run_says_why(folder):
    """Any Sampler has no upscale model and no mask, and this version none of another's settings."""
    _, report = samplers.MuLoSDSampler.execute(
        target=a_drawer(),
        draft=a_drawer("small", 1),
        condition=a_prompt(),
        seed=1,
        preset="custom",
        tau=0.3,
        upscale_model=Upscale(),
    ).result
    line, said = line_of(report, folder)
    assert "tau=0.3" in line and "up_sampler" not in line
    assert said == [
        "mulosd: the line does not repeat this run in the node Any Sampler. Tiny x3 enlarged the draft; use "
        "MuLo-SD Sampler with Tiny x3."
    ]

    mask = torch.zeros(1, 16, 16)
    mask[:, :8] = 1
    latent = {"samples": torch.zeros(1, 2, 4, 4), "noise_mask": mask}
    _, report = samplers.MARSampler.execute(
        model=a_mar(), condition=LABELS, seed=1, preset="custom", **SHORT, latent_image=latent
    ).result
    line, (said,) = line_of(report, folder)
    assert line.startswith("mar: steps=4, ") and "The run regenerated a part of an image" in said

    report.edits = ()
    report.settings |= {"shininess": 3, "order": "spiral"}
    line, (said,) = line_of(report, folder)
    assert "steps=4" in line and "shininess" not in line and "order" not in line
    assert "does not have some settings of this run (order, shininess)" in said or "(shininess, order)" in said


def test_a_report_holds_the_settings_of_its_sampler(folder):
    """All of them, so that a line from it leaves nothing to a preset or to the file."""
    _, report = samplers.MARSampler.execute(
        model=a_mar(), condition=LABELS, seed=1, preset="custom", **SHORT, cache=cache(**CACHED)
    ).result
    assert {*report.settings} == {*knobs(SAMPLERS["lazymar"].settings)}
