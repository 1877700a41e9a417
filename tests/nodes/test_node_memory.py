"""Lack of memory inside nodes: a smaller batch, a smaller tile, or a sentence; never an exception of torch."""

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from fake_comfy import Progress
from fastar_nodes.errors import UserError
from fastar_nodes.nodes import compare, host, samplers
from fastar_nodes.nodes import readers as node_readers
from fastar_nodes.nodes.host.loaded import Loaded
from fastar_nodes.runs import loading
from fastar_nodes.runs.registry import FAMILIES
from fastar_nodes.samplers.conditioning import from_ids
from faults import Faults
from test_compare_nodes import compared as compared_cells
from test_conditions import codes_of, readers, written  # noqa: F401 - fixtures

FEW = {"steps": 2, "diffusion_steps": 2}


def compared() -> torch.Tensor:
    return compared_cells(image_1=[torch.rand(2, 8, 8, 3)], report_1=[tiny.a_report("mar")])[0]


def mapped() -> torch.Tensor:
    record = tiny.a_report("mar")
    record.maps["step"] = torch.zeros(1, 4, 4, dtype=torch.int32).numpy()
    return compare.TokenMap.execute(report=record, what="fixed at step", opacity=1.0).result[0]


def nodes() -> dict[str, Callable[[], torch.Tensor]]:
    """Nodes to their results; networks are loaded before."""
    gpt, qwen, vae = tiny.a_gpt(), Loaded.of(tiny.tiny_tar()), tiny.a_vae()
    # Their last calls would be those of a preview, which may fail.
    model, block = (replace(loaded, vae=None) for loaded in (tiny.a_mar(), tiny.a_block()))
    return {
        "MAR Sampler": lambda: tiny.sample(samplers.MARSampler, model=model, **FEW)[0],
        "LlamaGen Sampler": lambda: tiny.sample(samplers.LlamaGenSampler, model=gpt)[0],
        "BitDance Sampler": lambda: tiny.sample(samplers.BitDanceSampler, model=block, diffusion_steps=2)[0],
        "Tar Prompt": lambda: tiny.a_prompt(qwen, detail="81").codes[1],
        "VAE Decode": lambda: vae.decode(torch.linspace(-1, 1, 40).view(5, 2, 2, 2)),
        "VAE Encode": lambda: vae.encode(torch.linspace(0, 1, 960).view(5, 8, 8, 3)),
    }


NODES = nodes()


@pytest.fixture(scope="module", autouse=True)
def _frozen():
    """Objects of other tests are not searched by the garbage collection after every failure."""
    gc.freeze()


@pytest.fixture(params=list(NODES))
def run(request, monkeypatch):
    monkeypatch.setattr(host.images.comfy.utils, "get_tiled_scale_steps", lambda *a, **about: 1, raising=False)
    return NODES[request.param]


@pytest.mark.fast_cases("Tar Prompt", "VAE Decode", "VAE Encode")
def test_a_call_that_fails_leaves_the_result(run, monkeypatch):
    whole = run()
    with Faults() as counted:
        run()
    assert counted.calls > 0
    # tests/samplers/test_batches.py tries every one.
    for n in range(0, counted.calls, 1 + counted.calls // 15):
        with Faults(n):
            torch.testing.assert_close(run(), whole, rtol=1e-4, atol=1e-4)
    assert torch.equal(run(), whole)
    assert all(0 < done <= total for done, total, _ in Progress.updates)


# Encoding the tiny images in tiles needs none of the calls that fail.
@pytest.mark.parametrize("run", [name for name in NODES if name != "VAE Encode"], indirect=True)
@pytest.mark.fast_cases("MAR Sampler", "Tar Prompt", "VAE Decode")
def test_a_card_that_stays_full_is_a_sentence(run):
    run()  # tables are built once
    with Faults() as counted:
        run()
    for n in range(0, counted.calls, 1 + counted.calls // 15):
        with Faults(n, lasting=True), pytest.raises(UserError, match="memory"):
            run()


def full(*args, **about):
    raise torch.OutOfMemoryError("CUDA out of memory.")


def test_pictures_codes_and_sheets(readers, monkeypatch):  # noqa: F811
    pictures = torch.rand(2, 20, 12, 3)
    with Faults(3, lasting=True), pytest.raises(UserError, match="^dtype: there is not enough memory"):
        codes_of(pictures)
    codes_of(pictures)
    for make, part in ((compared, "compare_grid"), (mapped, "token_map")):
        make()
        with monkeypatch.context() as m:
            m.setattr(compare, part, full)
            with pytest.raises(UserError, match="^image: there is not enough memory"):
                make()


def test_codes_are_read_and_weights_placed(monkeypatch):
    loaded, condition = tiny.a_drawer(), tiny.a_prompt(images=1)
    monkeypatch.setattr(node_readers, "features_of", full)
    with pytest.raises(UserError, match="^dtype: there is not enough memory"):
        node_readers.read_codes(condition, loaded)
    monkeypatch.setitem(FAMILIES, "mar", replace(FAMILIES["mar"], load_file=full))
    with pytest.raises(UserError, match="^dtype: there is not enough memory to load"):
        loading.load("mar", "demo", loading.Source(lambda *a: Path("x"), torch.device("cpu"), "fp32"))
    monkeypatch.setattr(host.devices.mm, "load_models_gpu", full)
    with pytest.raises(UserError, match="^dtype: the weights do not fit"):
        tiny.sample(samplers.MARSampler, **FEW)


def test_the_report_says_once_that_the_batch_was_split():
    sockets = {"model": tiny.a_mar()}
    with Faults(20):
        _, report = tiny.sample(samplers.MARSampler, condition=from_ids([1, 2, 3]), **sockets, **FEW)
    assert report.note.count("sampled 2 at a time") == 1 and report.images == 3 and len(report.maps["step"]) == 3


def test_decoding_takes_fewer_pictures_before_it_takes_tiles(monkeypatch):
    vae, sizes = tiny.a_vae(), []
    whole = vae.decode(torch.ones(5, 2, 2, 2))

    def decode(z):
        sizes.append(len(z))
        if len(z) > 2:
            full()
        return z.repeat_interleave(4, 2).repeat_interleave(4, 3)[:, [0, 1, 0]]

    monkeypatch.setattr(vae, "first_stage_model", SimpleNamespace(decode=decode))
    assert torch.equal(vae.decode(torch.ones(5, 2, 2, 2)), whole) and sizes == [5, 3, 2, 2, 1]
