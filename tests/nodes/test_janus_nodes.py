"""Load Janus and Prompt with the samplers of tokens, on the fake ComfyUI."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import fake_comfy
import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders import hub
from fastar_nodes.nodes.advisor import Advisor
from fastar_nodes.nodes.compare import Compare, TokenMap
from fastar_nodes.nodes.conditioning import Prompt
from fastar_nodes.nodes.loaders import LoadJanus
from fastar_nodes.nodes.samplers import LlamaGenSampler, MuLoSDSampler, PARSampler, ZipARSampler
from fastar_nodes.nodes.sharing import AnySampler
from fastar_nodes.nodes.sweep import SweepNode
from fastar_nodes.samplers.tokens.settings import LlamaGenSettings
from janus_files import one_file

CHOICE = "janus-pro-1b (download 4.18 GB, not pinned)"


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return one_file(tmp_path_factory.mktemp("janus") / "janus.safetensors")


@pytest.fixture
def loaded(path, monkeypatch):
    monkeypatch.setattr(hub, "absent", lambda *_: None)
    monkeypatch.setattr(hub, "resolve", lambda *_: path)
    return LoadJanus.execute(checkpoint=CHOICE, dtype="fp32", allow_download=False, speed="plain").result


RECOMMENDED, FAST = {"preset": "recommended"}, {"preset": "fast"}


def prompts(text: str, **values) -> object:
    return Prompt.execute(text=text, images=values.pop("images", 1), **values).result[0]


def test_a_prompt_becomes_a_picture(loaded):
    model, vae = loaded
    latent, report = LlamaGenSampler.execute(model=model, condition=prompts("a cat"), seed=3, preset=RECOMMENDED).result
    assert latent["samples"].shape == (1, 8, 4, 4) and vae.decode(latent["samples"]).shape == (1, 8, 8, 3)
    assert (report.model, report.settings["cfg"], report.settings["top_k"]) == ("Tiny Janus", 5.0, 0)
    same, _ = LlamaGenSampler.execute(
        model=model, condition=prompts("a cat"), seed=3, preset=RECOMMENDED, parallel=4
    ).result
    assert torch.equal(same["samples"], latent["samples"])


def test_every_line_is_a_prompt(loaded):
    model, _ = loaded
    batch = prompts("a cat\n\n the moon over the sea ", lines=True, images=2)
    assert batch.texts == ("a cat", "a cat", " the moon over the sea ", " the moon over the sea ")
    assert prompts("a cat\nthe moon").texts == ("a cat\nthe moon",) and prompts(" \n", lines=True).texts == ("",)
    together = ZipARSampler.execute(model=model, condition=batch, seed=3, preset=FAST).result[0]["samples"]
    first = ZipARSampler.execute(model=model, condition=prompts("a cat"), seed=3, preset=FAST).result[0]["samples"]
    assert torch.equal(together[:1], first)
    with pytest.raises(UserError, match="^images: 300 images"):
        prompts("a\nb\nc", lines=True, images=100)


def test_samplers_that_do_not_apply(loaded):
    model, _ = loaded
    with pytest.raises(UserError, match="^model: .*Janus.*its order"):
        PARSampler.execute(model=model, condition=prompts("a cat"), seed=0, preset=RECOMMENDED)
    with pytest.raises(UserError, match="^model: .*Janus.*smaller picture"):
        MuLoSDSampler.execute(target=model, draft=model, condition=prompts("a cat"), seed=0, preset=FAST)


def test_a_missing_file_is_not_fetched_unasked(monkeypatch):
    monkeypatch.setattr(hub, "resolve", lambda *_: pytest.fail("a download"))
    with pytest.raises(
        UserError, match="^checkpoint: .*janus-pro-1b .4.18 GB. .*deepseek-ai/Janus-Pro-1B.*allow_download"
    ):
        LoadJanus.execute(checkpoint=CHOICE, dtype="auto", allow_download=False, speed="plain")


def test_settings_of_the_widgets_reach_the_sampler(loaded):
    model, _ = loaded
    _, report = LlamaGenSampler.execute(
        model=model, condition=prompts("a cat"), seed=0, preset={"preset": "custom", "cfg": 1.5, "top_k": 3}
    ).result
    assert LlamaGenSettings(cfg=1.5, top_k=3) == LlamaGenSettings(**report.settings)


def test_a_picture_is_changed_under_a_mask(loaded):
    model, vae = loaded
    first = LlamaGenSampler.execute(model=model, condition=prompts("a cat"), seed=3, preset=RECOMMENDED).result[0][
        "samples"
    ]
    latent = {"samples": vae.encode(torch.rand(1, 8, 8, 3))}
    mask = torch.zeros(1, 8, 8)
    mask[:, 4:] = 1
    asked = {"model": model, "condition": prompts("a cat"), "seed": 3, "latent": latent, "preset": RECOMMENDED}
    changed = LlamaGenSampler.execute(**asked, mask=mask).result[0]["samples"]
    kept = vae.first_stage_model.codes(latent["samples"])[:, :2]
    assert torch.equal(vae.first_stage_model.codes(changed)[:, :2], kept) and not torch.equal(changed, first)
    noted = {**asked, "latent": {**latent, "noise_mask": mask[:, None]}}
    assert torch.equal(LlamaGenSampler.execute(**noted).result[0]["samples"], changed)
    with pytest.raises(UserError, match="^mask: "):
        LlamaGenSampler.execute(**asked)
    with pytest.raises(UserError, match="^latent: "):
        ZipARSampler.execute(**{**asked, "preset": FAST, "latent": {"samples": torch.zeros(1, 4, 4, 4)}}, mask=mask)
    with pytest.raises(UserError, match="^latent: "):
        ZipARSampler.execute(**{**asked, "preset": FAST, "latent": None}, mask=mask)


def test_any_sampler_compare_and_token_map(loaded):
    model, vae = loaded
    latent, report = LlamaGenSampler.execute(model=model, condition=prompts("a cat"), seed=3, preset=RECOMMENDED).result
    same, other = AnySampler.execute(model, prompts("a cat"), "llamagen: parallel=4", 3).result
    assert torch.equal(same["samples"], latent["samples"]) and other.settings["parallel"] == 4
    pictures = [vae.decode(made["samples"]) for made in (latent, same)]
    about = {"labels": [""], "columns": [0], "baseline": [0], "differences": [False]}
    pairs = {"image_1": [pictures[0]], "report_1": [report], "image_2": [pictures[1]], "report_2": [other]}
    grid, table = Compare.execute(**about, **pairs).result
    assert "identical" in table and grid.shape[0] == 1
    (shown,) = TokenMap.execute(other, image=pictures[1], what="outcome", opacity=0.6).result
    assert shown.shape[0] == 1 and shown.shape[2] == 384


def test_sweep_and_advisor(loaded, tmp_path, monkeypatch):
    model, _ = loaded
    monkeypatch.setattr(fake_comfy.state, "folder", tmp_path)
    (tmp_path / "input").mkdir()
    plan = {"sampler": "zipar", "settings": "", "x": "window", "x_values": "2, 4", "y": "none", "y_values": ""}
    found, _ = SweepNode.execute(model, prompts("a cat"), **plan, seeds="3").result
    assert [cell.quality.identical for cell in found.cells] == [False, True], "a window of a row is raster order"
    assert {cell.baseline.sampler for cell in found.cells} == {"llamagen"}
    node = type("Executed", (Advisor,), {"hidden": SimpleNamespace(unique_id="5", extra_pnginfo={}, prompt=None)})
    line, table = node.execute(model, prompts("a cat"), 3, measure="PSNR", least=0.0, repeats=1).result
    assert AnySampler.execute(model, prompts("a cat"), line, 3).result[1].sampler in ("llamagen", "zipar")
    assert "llamagen" in table
