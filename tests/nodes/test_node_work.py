"""Nodes on a fake ComfyUI: checks, driving a sampler, previews, cells of Compare."""

from __future__ import annotations

from collections.abc import Generator
from types import SimpleNamespace

import fake_comfy
import numpy as np
import pytest
import torch
from fake_comfy import Interrupted, Preview, Progress
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.networks.mar import MAR, MARConfig, MARModel, initialise
from fastar_nodes.nodes import comparison, conditioning, host, mar_samplers, preview, previous, schema
from fastar_nodes.reports.record import GIVEN, Report
from fastar_nodes.samplers import presets
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.mar.settings import (
    CacheSettings,
    CSpDSettings,
    FastHybridSettings,
    LazyMARSettings,
    MARSettings,
)
from fastar_nodes.samplers.settings import knobs
from torch import nn


class TinyVAE(nn.Module):
    """Two latent channels, stride 4: encode and decode are averages and copies."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def decode(self, z):
        x = torch.cat([z, z[:, :1]], dim=1) * self.scale
        return x.repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)

    def encode(self, x):
        mean = nn.functional.avg_pool2d(x, 4)[:, :2]
        return mean, torch.zeros_like(mean)


def tiny_vae() -> host.FastARVAE:
    return host.FastARVAE(TinyVAE(), "tiny", 4, 2, 8)


def steps(total: int, sent: list, closed: list) -> Generator:
    """A sampler that decides one of four tokens a step."""
    decided = torch.zeros(1, 2, 2, dtype=torch.bool)
    try:
        for i in range(total):
            decided.view(-1)[: i + 1] = True
            sent.append(
                (
                    yield SimpleNamespace(
                        done=i + 1, total=total, latents=torch.ones(1, 2, 2, 2), decided=decided.clone()
                    )
                )
            )
    finally:
        closed.append(True)
    return "result"


# ------------------------------------------------------------------------------------------------ host


def test_drive_reports_every_step_and_returns_the_result():
    sent, closed = [], []
    assert host.drive(steps(4, sent, closed), tiny_vae()) == "result"
    assert [(a, b) for a, b, _ in Progress.updates] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert Progress.updates[-1][2][0] == "JPEG" and Progress.updates[-1][2][1].size == (256, 256)
    assert closed and all(s >= 0 for s in sent), "the sampler receives the seconds it waited"


def test_cancel_stops_before_the_next_step_and_closes_the_sampler():
    sent, closed = [], []
    fake_comfy.state.interrupt_at = 2
    with pytest.raises(Interrupted):
        host.drive(steps(100, sent, closed), tiny_vae())
    assert len(Progress.updates) == 2 and closed == [True]


def test_no_preview_when_switched_off(monkeypatch):
    monkeypatch.setattr(host.args, "preview_method", Preview.NoPreviews)
    host.drive(steps(4, [], []), tiny_vae())
    assert all(picture is None for _, _, picture in Progress.updates)
    monkeypatch.undo()


def test_short_memory_costs_the_preview_only():
    vae = tiny_vae()

    def full(latents):
        raise RuntimeError("CUDA out of memory")

    vae.decode_now = full
    assert host.drive(steps(2, [], []), vae) == "result"


def test_the_error_of_a_sampler_is_passed_on():
    def broken():
        yield SimpleNamespace(
            done=1, total=2, latents=torch.zeros(1, 2, 2, 2), decided=torch.ones(1, 2, 2, dtype=torch.bool)
        )
        raise UserError("cfg: no")

    with pytest.raises(UserError, match="cfg"):
        host.drive(broken())


def test_vae_decodes_and_encodes():
    vae = tiny_vae()
    z = torch.rand(3, 2, 2, 3) * 2 - 1
    pictures = vae.decode(z)
    assert pictures.shape == (3, 8, 12, 3) and 0 <= pictures.min() and pictures.max() <= 1
    assert torch.allclose(vae.encode(pictures), z, atol=1e-6)
    assert torch.equal(vae.decode(z[:, :, None]), pictures)


def test_vae_falls_back_to_tiles_when_memory_is_short(monkeypatch):
    vae, asked = tiny_vae(), []
    monkeypatch.setattr(vae, "_in_chunks", lambda *a: (_ for _ in ()).throw(RuntimeError("out of memory")))
    monkeypatch.setattr(vae, "decode_tiled", lambda *a: asked.append(a[1:]) or "tiles")
    assert vae.decode(torch.zeros(1, 2, 2, 2)) == "tiles" and asked == [(64, 64, 16)]
    monkeypatch.setattr(vae, "_in_chunks", lambda *a: (_ for _ in ()).throw(RuntimeError("something else")))
    with pytest.raises(RuntimeError, match="something else"):
        vae.decode(torch.zeros(1, 2, 2, 2))


@pytest.mark.parametrize("height, width, out", [(8, 8, (2, 2)), (11, 9, (2, 2)), (3, 30, (1, 7)), (1, 1, (1, 1))])
def test_pictures_of_any_size_are_encoded(height, width, out):
    for channels in (1, 3, 4):
        assert tiny_vae().encode(torch.rand(1, height, width, channels)).shape == (1, 2, *out)


def test_networks_that_comfyui_left_behind_are_moved():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    host._load([SimpleNamespace(model=net, load_device=torch.device("meta"))], 1.0)
    assert all(t.is_meta for t in (*net.parameters(), *net.buffers()))
    assert fake_comfy.state.loaded[0][1] == {"memory_required": 1.0, "force_full_load": True}


# ------------------------------------------------------------------------------------------------ preview


def test_undecided_tokens_are_grey_and_batches_a_sheet():
    canvas = preview.Canvas(lambda z: z[:, :1, :, :].movedim(1, -1).repeat_interleave(8, 1).repeat_interleave(8, 2))
    decided = torch.zeros(5, 2, 2, dtype=torch.bool)
    decided[:, 0, 0] = True
    sheet = canvas.draw(torch.ones(5, 1, 2, 2), decided)
    assert sheet.shape == (256, 256, 3)
    one = sheet[:128, :128]
    assert (one[:64, :64] == 255).all() and (one[64:] == preview.GREY).all() and (one[:, 64:] == preview.GREY).all()


def test_previews_are_seldom_when_they_are_expensive(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(preview.time, "perf_counter", lambda: now[0])

    def slow(latents):
        now[0] += 2.0
        return torch.zeros(1, 4, 4, 3)

    canvas = preview.Canvas(slow)
    now[0] = 0.6
    assert canvas.due()
    canvas.draw(torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1, dtype=torch.bool))
    now[0] += 19
    assert not canvas.due()
    now[0] += 2
    assert canvas.due()


# ------------------------------------------------------------------------------------------------ nodes


@pytest.mark.parametrize("value", [-1, 2**64, 1.5, "7", None, True])
def test_seeds_that_are_none(value):
    with pytest.raises(UserError, match="^seed: "):
        schema.checked_seed(value)
    assert schema.checked_seed(2**64 - 1) == 2**64 - 1


def a_model(tokens: int = 16, classes: int = 10, label_set: str = "") -> host.Loaded:
    config = MARConfig(
        dim=16,
        encoder_depth=1,
        decoder_depth=2,
        heads=2,
        buffer=2,
        tokens=tokens,
        channels=2,
        classes=classes,
        head_depth=1,
        head_width=16,
    )
    return host.Loaded.of(
        MARModel(initialise(MAR(config)).eval(), "tiny", latent_scale=0.5, label_set=label_set), tiny_vae()
    )


def values(settings: type, **changes):
    return {name: default for name, (default, _) in knobs(settings).items()} | changes


def models(node: type) -> dict[str, host.Loaded]:
    """Values of a sampler's model sockets."""
    return {"draft": a_model(), "target": a_model()} if node is mar_samplers.CSpDSampler else {"model": a_model()}


SAMPLERS = {
    mar_samplers.MARSampler: MARSettings,
    mar_samplers.FastHybridSampler: FastHybridSettings,
    mar_samplers.LazyMARSampler: LazyMARSettings,
    mar_samplers.CSpDSampler: CSpDSettings,
}


def test_every_mar_sampler_is_listed_here():
    missing = {*mar_samplers.NODES} - {*SAMPLERS, mar_samplers.LazyMARCache}
    assert not missing, f"add {', '.join(node.__name__ for node in missing)} to SAMPLERS in this file"


def sample(node: type, what=(1,), seed: int = 3, sockets=None, **changes):
    """A short run of a sampler node: its LATENT's samples and its report."""
    wanted = {"ar_steps": 4, "diffusion_steps": 4} | changes
    extra = {name: wanted.pop(name) for name in ("preset", "cache", "latent", "mask") if name in wanted}
    condition = from_ids(list(what))
    done = node.execute(
        **(sockets or models(node)), condition=condition, seed=seed, **values(SAMPLERS[node], **wanted), **extra
    )
    return done.result[0]["samples"], done.result[1]


@pytest.mark.parametrize("node", SAMPLERS)
def test_samplers_give_latents_and_a_report(node):
    samples, report = sample(node, [1, 2])
    assert samples.shape == (2, 2, 4, 4) and samples.dtype == torch.float32
    assert report.seed == 3 and report.images == 2
    assert report.settings == values(SAMPLERS[node], ar_steps=4, diffusion_steps=4)


def test_noise_beyond_reason_is_refused_before_it_is_made():
    with pytest.raises(UserError, match="GB of noise"):
        mar_samplers.MARSampler.execute(
            model=a_model(4096), condition=from_ids([1] * 256), seed=0, **values(MARSettings, diffusion_steps=1000)
        )


@pytest.mark.parametrize("bad", ["text", 5, None, {"samples": 1}, SimpleNamespace(model=3)])
def test_the_wrong_thing_on_a_socket(bad):
    with pytest.raises(UserError, match="^model: .*Load MAR"):
        mar_samplers.MARSampler.execute(model=bad, condition=from_ids([1]), seed=0, **values(MARSettings))
    with pytest.raises(UserError, match="^model: .*Load MAR"):
        wrong = host.Loaded.of(SimpleNamespace(net=TinyVAE()))
        mar_samplers.MARSampler.execute(model=wrong, condition=from_ids([1]), seed=0, **values(MARSettings))
    with pytest.raises(UserError, match="^condition: .*Class Label"):
        mar_samplers.MARSampler.execute(model=a_model(), condition=bad, seed=0, **values(MARSettings))
    for name, pair in (("draft", (bad, a_model())), ("target", (a_model(), bad))):
        with pytest.raises(UserError, match=f"^{name}: .*Load MAR"):
            sample(mar_samplers.CSpDSampler, sockets=dict(zip(("draft", "target"), pair, strict=True)))
    if bad is not None:
        with pytest.raises(UserError, match="^cache: .*LazyMAR Cache"):
            sample(mar_samplers.MARSampler, cache=bad)


def test_a_draft_that_does_not_fit_the_target():
    with pytest.raises(UserError, match="^draft: .* differ in classes, 7 and 10"):
        sample(mar_samplers.CSpDSampler, sockets={"draft": a_model(classes=7), "target": a_model()})
    with pytest.raises(UserError, match="^draft: .* differ in tokens, 64 and 16"):
        sample(mar_samplers.CSpDSampler, sockets={"draft": a_model(64), "target": a_model()})


def test_both_models_are_brought_to_the_device():
    both = models(mar_samplers.CSpDSampler)
    sample(mar_samplers.CSpDSampler, sockets=both)
    assert [both["target"].patcher, both["draft"].patcher] == fake_comfy.state.loaded[-1][0][:2]
    one = a_model()
    sample(mar_samplers.CSpDSampler, sockets={"draft": one, "target": one})
    assert fake_comfy.state.loaded[-1][0].count(one.patcher) == 1


# --- the cache plug


@pytest.mark.parametrize(
    "node, name",
    [
        (mar_samplers.MARSampler, "lazymar"),
        (mar_samplers.FastHybridSampler, "fasthybrid+lazymar"),
        (mar_samplers.CSpDSampler, "cspd+lazymar"),
    ],
)
def test_a_cache_plugs_into_every_other_sampler(node, name):
    (cache,) = mar_samplers.LazyMARCache.execute(**values(CacheSettings, refresh_period=3, start_step=1)).result
    sockets = models(node)
    first, report = sample(node, sockets=sockets, ar_steps=8, cache=cache)
    assert report.sampler == name and report.settings["refresh_period"] == 3
    again, _ = sample(node, sockets=sockets, ar_steps=8, cache=cache)
    assert torch.equal(first, again), "one run left something in the cache for the next"
    assert "lazymar" not in sample(node, sockets=sockets, ar_steps=8, cache=None)[1].sampler


def test_lazymar_cache_on_plain_mar_is_lazymar_sampler():
    changes = {"refresh_period": 3, "start_step": 1}
    sockets = {"model": a_model()}
    (cache,) = mar_samplers.LazyMARCache.execute(**values(CacheSettings, **changes)).result
    a, record = sample(mar_samplers.MARSampler, sockets=sockets, ar_steps=8, cache=cache)
    b, wanted = sample(mar_samplers.LazyMARSampler, sockets=sockets, ar_steps=8, **changes)
    assert torch.equal(a, b) and record.counts == wanted.counts


def test_cache_settings_are_checked():
    with pytest.raises(UserError, match="^refresh_period: "):
        mar_samplers.LazyMARCache.execute(**values(CacheSettings, refresh_period=-2))
    (cache,) = mar_samplers.LazyMARCache.execute(**values(CacheSettings, block=3)).result
    with pytest.raises(UserError, match="^block: 3 is outside 1 to 2"):
        sample(mar_samplers.MARSampler, cache=cache)
    (cache,) = mar_samplers.LazyMARCache.execute(**values(CacheSettings)).result
    with pytest.raises(UserError, match="^speculation: .*head_cache"):
        sample(mar_samplers.MARSampler, cache=cache, speculation=4, diffusion_steps=30)


# --- editing


def half(height: int = 8, width: int = 8) -> torch.Tensor:
    """A mask [1, height, width] over the right half."""
    mask = torch.zeros(1, height, width)
    mask[..., width // 2 :] = 1
    return mask


@pytest.mark.parametrize("node", SAMPLERS)
def test_every_sampler_redraws_the_mask_and_gives_back_the_rest(node):
    start = torch.randn(1, 2, 4, 4)
    samples, report = sample(node, [1, 2], latent={"samples": start}, mask=half())
    assert torch.equal(samples[..., :2], start[..., :2].expand(2, -1, -1, -1))
    assert not (samples[..., 2:] == start[..., 2:]).any()
    assert (report.maps["outcome"][:, :, :2] == GIVEN).all() and (report.maps["step"][:, :, :2] == -1).all()
    assert (report.maps["outcome"][:, :, 2:] != GIVEN).all() and (report.maps["step"][:, :, 2:] >= 0).all()


def test_masks_of_every_shape_and_the_latents_own():
    latent = {"samples": torch.randn(1, 2, 4, 4)}
    sockets = {"model": a_model()}
    wanted, _ = sample(mar_samplers.MARSampler, sockets=sockets, latent=latent, mask=half(4, 4))
    for mask in (half()[0], half()[:, None], half(64, 32), half().half()):
        assert torch.equal(sample(mar_samplers.MARSampler, sockets=sockets, latent=latent, mask=mask)[0], wanted)
    own = latent | {"noise_mask": half()[:, None]}
    assert torch.equal(sample(mar_samplers.MARSampler, sockets=sockets, latent=own)[0], wanted)
    # A mask on the socket goes before the latent's own.
    everywhere = latent | {"noise_mask": torch.ones(1, 1, 8, 8)}
    assert torch.equal(sample(mar_samplers.MARSampler, sockets=sockets, latent=everywhere, mask=half())[0], wanted)


PICTURE = {"samples": torch.zeros(1, 2, 4, 4)}
UNEVEN = torch.stack([half()[0], torch.ones(8, 8)])
EDITS = {
    "a mask without a picture": ({"mask": half()}, "^latent: .*no picture to change"),
    "a picture without a mask": ({"latent": PICTURE}, "^mask: .*nothing of the latent would be kept"),
    "text for a latent": (
        {"latent": "cat.png", "mask": half()},
        "^latent: it got no LATENT; connect the output of VAE Encode",
    ),
    "a latent of nothing": ({"latent": {"samples": 1}, "mask": half()}, "^latent: it got no LATENT"),
    "a latent of another model": (
        {"latent": {"samples": torch.zeros(1, 4, 8, 8)}, "mask": half()},
        "^latent: .*VAE Encode",
    ),
    "latents of too many pictures": (
        {"latent": {"samples": torch.zeros(3, 2, 4, 4)}, "mask": half()},
        "^latent: .*3 entries",
    ),
    "a latent that is not finite": (
        {"latent": {"samples": torch.full((1, 2, 4, 4), torch.nan)}, "mask": half()},
        "^latent: .*finite",
    ),
    "text for a mask": (
        {"latent": PICTURE, "mask": "m"},
        "^mask: it got the text 'm'; connect the output of a node that gives a MASK",
    ),
    "an empty mask": ({"latent": PICTURE, "mask": torch.zeros(1, 8, 8)}, "^mask: it is empty; paint"),
    "a mask of no size": ({"latent": PICTURE, "mask": torch.zeros(1, 0, 8)}, "^mask: .*shape"),
    "a mask that is a line": ({"latent": PICTURE, "mask": torch.ones(8)}, "^mask: .*shape"),
    "masks of too many pictures": ({"latent": PICTURE, "mask": half().expand(3, -1, -1)}, "^mask: .*3 entries"),
    "masks that cover unequal parts": ({"latent": PICTURE, "mask": UNEVEN}, "^mask: .*different numbers of tokens"),
    "a mask that is not finite": ({"latent": PICTURE, "mask": half() / 0}, "^mask: .*finite"),
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("node", [mar_samplers.MARSampler, mar_samplers.CSpDSampler])
def test_an_edit_that_cannot_be_is_reported(node, name):
    sockets, words = EDITS[name]
    with pytest.raises(UserError, match=words) as problem:
        sample(node, [1, 2], **sockets)
    assert str(problem.value).endswith(".") and "\n" not in str(problem.value)


# --- presets


PREVIOUS = {
    previous.PreviousFastHybrid: FastHybridSettings,
    previous.PreviousLazyMAR: LazyMARSettings,
    previous.PreviousCSpD: CSpDSettings,
}


@pytest.mark.parametrize("node", PREVIOUS)
@pytest.mark.parametrize("label_set", ["picture-book", ""])
def test_a_preset_of_a_previous_node_replaces_the_widgets(node, label_set):
    demo = label_set == "picture-book"
    names = ("draft", "target") if node is previous.PreviousCSpD else ("model",)
    sockets = {name: a_model(label_set=label_set) for name in names}

    def settings(preset: str, **changes):
        wanted = values(PREVIOUS[node], **{"ar_steps": 4, "diffusion_steps": 4, "cfg": 1.5} | changes)
        done = node.execute(**sockets, condition=from_ids([1]), seed=3, preset=preset, **wanted)
        return done.result[1].settings

    # LazyMAR's fast preset also sets the AR steps, to more than the tiny model has tokens.
    for name in ("balanced",) if node is previous.PreviousLazyMAR else ("balanced", "fast"):
        meant = presets.values(PREVIOUS[node], name, demo, ar_steps=4)
        assert meant
        assert settings(name) == values(PREVIOUS[node], ar_steps=4, diffusion_steps=4, cfg=1.5) | meant
    assert settings("as set") == values(PREVIOUS[node], ar_steps=4, diffusion_steps=4, cfg=1.5)
    with pytest.raises(UserError, match="^preset: 'best' is not one of as set, exact"):
        settings("best")


def test_a_threshold_of_a_previous_node_means_itself():
    """-1 is auto in the newer node; here it accepts every draft."""
    wanted = values(FastHybridSettings, ar_steps=4, diffusion_steps=4, threshold=-1.0)
    done = previous.PreviousFastHybrid.execute(model=a_model(), condition=from_ids([1]), seed=3, **wanted)
    assert done.result[1].settings["threshold"] == -1.0


def test_cache_presets_of_the_previous_node_are_for_the_model_that_is_named():
    run = previous.PreviousLazyMARCache.execute
    for preset_for in ("demo", "full size"):
        for name in ("exact", "balanced", "fast"):
            done = run(**values(CacheSettings), preset=name, preset_for=preset_for)
            meant = presets.values(CacheSettings, name, preset_for == "demo")
            assert done.result[0] == CacheSettings(**values(CacheSettings) | meant)
    assert run(**values(CacheSettings)).result[0] == CacheSettings()
    with pytest.raises(UserError, match="^preset_for: 'tiny' is not one of demo, full size"):
        run(**values(CacheSettings), preset="fast", preset_for="tiny")


# --- labels


def label(**about):
    return conditioning.ClassLabel.execute(
        **{"labels": "cat", "label_set": "picture-book", "images_per_label": 1, "add_label": "none"} | about
    ).result[0]


def test_labels_by_name_id_and_menu():
    assert label(labels="Cat, 0", images_per_label=2).labels == (9, 9, 0, 0)
    assert label(labels="", add_label="boat (picture-book)").names == ("boat",)
    assert label(labels="cat", add_label="boat (picture-book)").labels == (9, 7)
    with pytest.raises(UserError, match="^add_label: .*label_set"):
        label(add_label="goldfish (imagenet-1k)")
    with pytest.raises(UserError, match="256"):
        label(labels="cat,cat", images_per_label=129)


def report(sampler: str, seconds: float = 1.0, **settings) -> Report:
    return Report(sampler, "m", settings, 1, 1, "cpu", seconds=seconds, counts={"transformer_passes": 3})


def compare(**about):
    return comparison.Compare.execute(**{"labels": [""], "columns": [0], "baseline": [0]} | about).result


def test_compare_measures_against_the_plain_sampler():
    image = torch.rand(1, 8, 8, 3)
    pairs = {
        "image_1": [image],
        "image_2": [image],
        "report_2": [report("mar", 4.0)],
        "image_3": [image],
        "report_3": [report("x", 2.0)],
    }
    grid, table = compare(**pairs)
    assert grid.shape[0] == 1 and grid.shape[3] == 3 and 0 <= grid.min() and grid.max() <= 1
    lines, below = (part.splitlines() for part in table.split("\n\n"))
    assert len(lines) == 4 and "MAR" in lines[2] and "1.00x" in lines[2] and "2.00x" in lines[3]
    assert len(below) == 1 and "passes: sequential evaluations of the large network" in below[0]
    with pytest.raises(UserError, match="^baseline: .*no report"):
        compare(**pairs, baseline=[1])
    with pytest.raises(UserError, match="^baseline: .*only 3"):
        compare(**pairs, baseline=[4])


@pytest.mark.parametrize(
    "cells, best",
    [
        # A sweep of thresholds: the exact one, wherever it is; without one the slowest.
        ([("fasthybrid", 2.0, {"threshold": t, "lookahead": 4}) for t in (0.8, 0.9, 1.01)], 2),
        ([("fasthybrid", s, {"threshold": t, "lookahead": 4}) for t, s in ((0.8, 2.0), (0.95, 3.0), (0.9, 2.5))], 1),
        ([("lazymar", 1.0, {"refresh_period": n}) for n in (9, 1, 4)], 1),
        ([("cspd", 2.0, {"prefill_ratio": r}) for r in (0.1, 1.0)], 1),
        ([("zipar", 1.0, {"window": n}) for n in (1, 4, 8)], 2),
        ([("mulosd", 1.0, {"tau": 1.01, "resample_window": 0}), ("mulosd", 3.0, {"tau": 0.1})], 0),
        # The plain sampler comes before an accelerator at its exact setting, and does not have to be the slowest.
        ([("fasthybrid", 9.0, {"lookahead": 0}), ("mar", 4.0, {})], 1),
        ([("mar", 4.0, {"speculation": 8}), ("mar", 3.0, {"speculation": 0})], 1),
        ([("mar", 4.0, {"diffusion_steps_end": 5}), ("mar", 3.0, {})], 1),
        ([("jacobi", 1.0, {}), ("par", 2.0, {"group": 4}), ("llamagen", 2.0, {})], 2),
        (
            [
                ("fasthybrid+lazymar", 1.0, {"lookahead": 0, "refresh_period": 9}),
                ("lazymar", 0.5, {"refresh_period": 1}),
            ],
            1,
        ),
    ],
)
def test_the_baseline_of_a_sweep(cells, best):
    reports = [report(name, seconds, **settings) for name, seconds, settings in cells]
    for one in reports:
        one.maps["step"] = np.zeros((1, 8, 8), np.int32)
    assert comparison._baselines(0, reports) == [best] * len(reports)


def test_of_several_plain_samplers_the_one_with_most_work_is_the_baseline():
    reports = [report("mar", seconds) for seconds in (1.0, 2.0, 3.0)]
    for one, passes in zip(reports, (16, 64, 32), strict=True):
        one.counts = {"transformer_passes": passes, "head_calls": 100 * passes}
    assert comparison._baselines(0, reports) == [1, 1, 1]


def test_compare_without_reports_and_with_none_in_lists():
    grid, table = compare(image_1=[torch.rand(2, 8, 8, 1)], image_2=[None], report_2=[None], labels=["one\n"])
    assert grid.ndim == 4 and table.startswith("No reports")


def test_compare_needs_as_many_reports_as_pictures():
    with pytest.raises(UserError, match="^report_1: .*2 reports for 1"):
        compare(image_1=[torch.rand(1, 8, 8, 3)], report_1=[report("mar"), report("mar")])
    with pytest.raises(UserError, match="^image_1: .*64"):
        compare(image_1=[torch.rand(1, 8, 8, 3)] * 65)


def test_automatic_labels_tell_what_differs():
    fast = [report("fasthybrid", threshold=t, k=1) for t in (0.8, 0.9)]
    names = comparison.automatic_labels([report("mar"), None, *fast])
    assert names == ["MAR", "picture 2", "FastHybrid threshold 0.8", "FastHybrid threshold 0.9"]


def test_combinations_have_a_title():
    names = comparison.automatic_labels([report(name) for name in ("lazymar", "fasthybrid+lazymar", "mar+other")])
    assert names == ["LazyMAR", "FastHybrid + LazyMAR", "MAR + other"]


def test_pictures_of_every_sampler_are_compared():
    """Reports as the samplers really make them, with one map each."""
    (cache,) = mar_samplers.LazyMARCache.execute(**values(CacheSettings, refresh_period=3, start_step=1)).result
    runs = [sample(node, ar_steps=8) for node in SAMPLERS] + [
        sample(mar_samplers.FastHybridSampler, ar_steps=8, cache=cache)
    ]
    pairs = {}
    for i, (samples, record) in enumerate(runs, 1):
        pairs |= {f"image_{i}": [tiny_vae().decode(samples)], f"report_{i}": [record]}
    _, table = compare(**pairs)
    lines = [line.split("|")[1].strip() for line in table.partition("\n\n")[0].splitlines()[2:]]
    assert len(lines) == len(runs) and lines[0] == "MAR" and "LazyMAR" in lines and lines[-1].startswith("FastHybrid")
    shown = {"fasthybrid": "outcome", "lazymar": "cached", "cspd": "rejected", "fasthybrid+lazymar": "cached"}
    for samples, record in runs:
        what = shown.get(record.sampler, "order")
        (image,) = comparison.TokenMap.execute(
            report=record, image=tiny_vae().decode(samples), what=what, opacity=0.5
        ).result
        assert image.shape[0] == 1, record.sampler


def test_nothing_is_marked_where_nothing_is_measured(monkeypatch):
    seen = []
    monkeypatch.setattr(
        comparison, "compare_grid", lambda *a, **k: seen.append(k["marked"]) or np.zeros((8, 8, 3), np.uint8)
    )
    image = torch.rand(1, 8, 8, 3)
    compare(image_1=[image], image_2=[image])
    compare(image_1=[image], image_2=[image], report_2=[report("mar")])
    assert seen == [False, True]


def test_token_map_and_report():
    record = report("fasthybrid")
    record.maps["step"] = np.zeros((2, 4, 4), np.int32)
    record.maps["outcome"] = np.ones((2, 4, 4), np.uint8)
    (image,) = comparison.TokenMap.execute(
        report=record, image=torch.rand(2, 8, 8, 3), what="outcome", opacity=0.5
    ).result
    assert image.shape[0] == 2 and image.shape[2] == 384
    (bare,) = comparison.TokenMap.execute(report=record, what="fixed at step", opacity=1.0).result
    assert bare.shape[0] == 2
    with pytest.raises(UserError, match="^opacity: "):
        comparison.TokenMap.execute(report=record, what="outcome", opacity=float("nan"))
    assert comparison.ReportToText.execute(report=record, format="csv").result[0].startswith("sampler,")
    for what in ("rejected", "drafted"):
        assert comparison.TokenMap.execute(report=record, what=what, opacity=1.0).result[0].shape[0] == 2
    with pytest.raises(UserError, match="^what: .*no map for 'cached'"):
        comparison.TokenMap.execute(report=record, what="cached", opacity=1.0)
    with pytest.raises(UserError, match="^report: "):
        comparison.ReportToText.execute(report={"x": 1}, format="csv")
