"""The three steps of a run, with numbers by hand: what is checked, what memory is asked for, and
what the sampler gets.
"""

import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import fake_comfy
import pytest
import tiny
import torch
from fake_comfy import Progress
from fastar_nodes.errors import UserError
from fastar_nodes.nodes import caches, graph, host, readers, running, samplers
from fastar_nodes.nodes.host.loaded import Loaded, ModelCache, load_to_device, to_device
from fastar_nodes.nodes.running import Sockets
from fastar_nodes.nodes.vae import KL, VQ, kind_of, mark
from fastar_nodes.runs.choice import Choice, choose
from fastar_nodes.runs.families.tokens import TokenFamily
from fastar_nodes.runs.memory import DECODE
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.conditioning import PromptCondition, from_ids
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.mar.lazy.settings import CacheSettings
from fastar_nodes.samplers.mar.mar import mar
from fastar_nodes.samplers.mar.settings import MARSettings
from fastar_nodes.samplers.settings import knobs, settings_from
from fastar_nodes.samplers.tokens.mulosd.settings import MuLoSDSettings
from fastar_nodes.samplers.tokens.par import NON_LOCAL
from fastar_nodes.samplers.tokens.settings import LlamaGenSettings
from nextstep_models import tiny_nextstep
from tiny import LABELS, a_block, a_drawer, a_gpt, a_mar, a_nextstep, a_prompt, subjects


def an_odd_gpt() -> Loaded:
    """One whose grid has no four regions."""
    return a_gpt(grid=5)


FEW = settings_from(MARSettings, {"steps": 2, "diffusion_steps": 2})


def checked(entry: str, loaded, settings, **sockets):
    sockets.setdefault("condition", LABELS)
    return running.check(SAMPLERS[entry], loaded, settings, 3, Sockets(**sockets))


def test_a_draft_mar_is_loaded_too():
    small = a_mar()
    room = checked("cspd", a_mar(), settings_from(SAMPLERS["cspd"].settings, {"steps": 2}), draft=small).estimate()
    assert room.others == [small.patcher]


def test_a_draft_of_codes_is_enlarged_and_encoded(monkeypatch):
    """The large model makes 6 x 6 tokens of 2 x 2 pixels."""
    large = a_drawer()
    small = a_drawer("small", 1)
    monkeypatch.setattr(TokenFamily, "memory", lambda *_, **more: {"sampling": 100})
    monkeypatch.setattr(large.vae, "memory_used_encode", lambda shape, dtype: 10.0 * shape[2] * shape[3])
    codes = a_prompt(images=3)
    run = checked("mulosd", large, MuLoSDSettings(), condition=codes, draft=small)
    room = run.estimate()
    assert room.memory == 100 + 3 * 10 * 12 * 12 and room.latents == (3, 4, 6, 6)
    assert room.others == [small.patcher, large.vae.patcher]
    monkeypatch.setattr(running, "_PIXELS", 2 * 12 * 12 + 1)
    assert run.estimate().memory == 100 + 2 * 10 * 12 * 12, "two images at once"
    monkeypatch.setattr(running, "_PIXELS", 5)
    assert run.estimate().memory == 100 + 10 * 12 * 12, "at least one"


def test_features_take_as_many_rows_as_their_codes():
    """The memory is estimated before the codes are read."""
    loaded = a_drawer()
    codes = a_prompt(images=2)
    read = readers.read_codes(codes, loaded)
    assert [len(rows) for rows in read.features] == [len(own) for own in codes.codes]
    ((patchers, about),) = [call for call in fake_comfy.state.loaded if call[0] == [loaded.parts["ta_tok"].patcher]]
    assert about["memory_required"] == 256 * 1024 * 1024


def test_nothing_is_loaded_before_all_is_checked():
    mask = torch.ones(1, 4, 4)
    wrong = {
        "condition": {"condition": 5},
        "latent_image": {"latent_image": {"samples": mark(torch.zeros(1, 2, 4, 4), VQ)}, "mask": mask},
        "mask": {"latent_image": {"samples": torch.ones(1, 2, 4, 4)}},
        "cache": {"cache": 5},
    }
    for field, sockets in wrong.items():
        with pytest.raises(UserError, match=f"^{field}: "):
            running.run(SAMPLERS["mar"], a_mar(), FEW, 3, Sockets(**{"condition": LABELS, **sockets}))
    with pytest.raises(UserError, match="^draft: "):
        running.run(SAMPLERS["cspd"], a_mar(), FEW, 3, Sockets(LABELS))
    assert not fake_comfy.state.loaded


# Settings that a model cannot be sampled with: sampler, model, settings, and the field that the message names.
UNSUITED = [
    ("mar", a_mar, {"steps": 17}, "steps"),
    ("fasthybrid+lazymar", a_mar, {"steps": 17}, "steps"),
    ("lazymar", a_mar, {"steps": 17}, "steps"),
    ("cspd+lazymar", a_mar, {"steps": 4, "diffusion_steps": 40, "mode": "lossless", "speculation": 4}, "speculation"),
    ("par", an_odd_gpt, {"grouping": NON_LOCAL}, "grouping"),
    ("par", a_gpt, {}, "grouping"),
    ("mulosd", a_drawer, {"neighbours": 1000}, "neighbours"),
    ("bitdance", a_block, {"width": 12}, "width"),
    ("nextstep", a_nextstep, {"width": 10}, "width"),
]


@pytest.mark.parametrize(("sampler", "model", "settings", "field"), UNSUITED)
def test_settings_that_do_not_suit_a_model_are_refused_before_anything_is_loaded(sampler, model, settings, field):
    """By the sampler's node, and before the first cell of a sweep."""
    entry = SAMPLERS[sampler]
    loaded = model()
    made = settings_from(entry.settings, settings)
    condition = subjects(sampler)
    with pytest.raises(UserError, match=f"^{field}: ") as refused:
        running.run(entry, loaded, made, 3, Sockets(condition, draft=loaded))
    with pytest.raises(UserError, match=f"^{field}: "):
        running.expect_suited_settings(Choice(entry, values=settings), loaded)
    assert not fake_comfy.state.loaded

    # The sampler as a function says the same.
    if not entry.needs_draft:
        noise = entry.family.noise(3, range(2))
        with pytest.raises(UserError) as told:
            finish(entry.run(loaded.model, condition, made, noise))
        assert str(told.value) == str(refused.value)


def test_a_cache_that_does_not_suit_is_refused_before_anything_is_loaded():
    made = settings_from(MARSettings, {"steps": 2, "diffusion_steps": 40, "speculation": 4})
    for told, values in {
        "speculation: ": {},
        "cache: the settings of LazyMAR Cache do not fit .refresh_period: ": {"refresh_period": 0},
    }.items():
        cache = caches.CachePlan("custom", values)
        with pytest.raises(UserError, match=f"^{told}"):
            running.run(SAMPLERS["mar"], a_mar(), made, 3, Sockets(LABELS, cache=cache))
    assert not fake_comfy.state.loaded


def test_a_sampler_without_caches_has_no_socket_for_them_and_refuses_one(monkeypatch):
    def plain(model, condition, settings, noise, edit=None):
        return mar(model, condition, settings, noise, edit=edit)

    entry = replace(SAMPLERS["mar"], name="plain", title="Plain", run=plain, caches=())
    monkeypatch.setitem(SAMPLERS, "plain", entry)
    node = type("PlainSampler", (samplers.MARSampler,), {"sampler": "plain"})
    ids = [part.id for part in node.define_schema().inputs]
    assert "cache" not in ids and {"latent_image", "mask"} <= {*ids}

    with pytest.raises(UserError, match="^cache: Plain does not work with LazyMAR's caches; disconnect"):
        running.run(entry, a_mar(), FEW, 3, Sockets(LABELS, cache=CacheSettings()))
    assert not fake_comfy.state.loaded
    assert running.run(entry, a_mar(), FEW, 3, Sockets(LABELS)).result[1].sampler == "mar"


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_cache_is_drawn_with_or_refused_by_every_sampler(name):
    """Which node shows the socket follows from the function that runs."""
    entry = SAMPLERS[name]
    if "+" in name or name == "tar":  # no nodes of their own
        return
    node = tiny.node_of(name)
    ids = [part.id for part in node.define_schema().inputs]
    assert ("cache" in ids) == bool(entry.caches)
    if entry.caches:
        _, report = tiny.sample(node, cache=caches.CachePlan("custom", {}))
        assert report.sampler == ("lazymar" if name == "mar" else f"{name}+lazymar")


# Edits that do not fit: sampler, model, start and mask, and the field that the message names.
CORNER = torch.zeros(2, 4, 4)
CORNER[0, 0, 0] = CORNER[1] = 1
EDITS = [
    ("mar", a_mar, torch.zeros(1, 2, 3, 3), torch.ones(1, 4, 4), "latent_image"),
    ("mar", a_mar, torch.zeros(1, 2, 4, 4), torch.zeros(1, 4, 4), "mask"),
    ("mar", a_mar, torch.zeros(1, 2, 4, 4), CORNER, "mask"),
    ("mar", a_mar, torch.zeros(1, 2, 4, 4), torch.ones(1).expand(1 << 20, 1 << 30), "mask"),
    ("llamagen", a_gpt, torch.zeros(1, 4, 3, 3), torch.ones(1, 4, 4), "latent_image"),
    ("llamagen", a_gpt, torch.zeros(3, 4, 4, 4), torch.ones(1, 4, 4), "latent_image"),
    ("bitdance", a_block, torch.zeros(1, 6, 3, 3), torch.ones(1, 4, 4), "latent_image"),
    ("bitdance", a_block, torch.zeros(1, 6, 4, 4), torch.ones(3, 4, 4), "mask"),
    ("nextstep", a_nextstep, torch.zeros(1, 4, 4, 4), torch.ones(1, 4, 4), "latent_image"),
    ("nextstep", a_nextstep, torch.zeros(1, 6, 6, 6), torch.ones(1, 4, 4), "latent_image"),
    ("nextstep", a_nextstep, torch.zeros(1, 4, 6, 6), torch.zeros(1, 4, 4), "mask"),
    ("nextstep", a_nextstep, torch.zeros(1, 4, 6, 6), torch.ones(3, 4, 4), "mask"),
]


@pytest.mark.parametrize(("sampler", "model", "start", "mask", "field"), EDITS)
def test_an_edit_that_does_not_fit_is_refused_before_anything_is_loaded(sampler, model, start, mask, field):
    entry = SAMPLERS[sampler]
    sockets = Sockets(subjects(sampler), latent_image={"samples": start}, mask=mask)
    with pytest.raises(UserError, match=f"^{field}: "):
        running.run(entry, model(), FEW if entry.caches else settings_from(entry.settings, {}), 3, sockets)
    assert not fake_comfy.state.loaded


# ------------------------------------------------------------------------------------------------ parts of a batch


def a_square() -> Loaded:
    """A NextStep for 16 x 16 pixels, which core's empty latents can ask for."""
    return a_nextstep(tiny_nextstep(side=4))


# The sampler, its model, and the channels of its latents.
BATCHES = {
    "mar": (a_mar, 2),
    "fasthybrid": (a_mar, 2),
    "llamagen": (a_gpt, 4),
    "bitdance": (a_block, 6),
    "nextstep": (a_square, 4),
}


def entries(sampler: str, numbers) -> Any:
    """A condition that a sampler's model reads: labels of these numbers, or prompts of as many words."""
    if "class" in SAMPLERS[sampler].family.reads:
        return from_ids(numbers)
    return PromptCondition(tuple(" ".join(["cats"] * n) for n in numbers))


@pytest.mark.parametrize("whole", [True, False], ids=["all drawn", "half drawn"])
@pytest.mark.parametrize("sampler", BATCHES)
def test_an_image_of_a_batch_is_drawn_as_in_the_whole_batch(sampler, whole):
    """Rebatch Latents and Latent From Batch say which images they hold, as core's KSampler reads it."""
    model, channels = BATCHES[sampler]
    loaded = model()
    entry = SAMPLERS[sampler]
    few = {"steps": 3, "diffusion_steps": 3}
    settings = settings_from(
        entry.settings, {name: count for name, count in few.items() if name in knobs(entry.settings)}
    )
    sides = entry.family.latents(loaded.model, settings)
    start = torch.randn(3, channels, *sides, generator=torch.Generator().manual_seed(1)).sign()
    masks = torch.ones(3, 4, 4) if whole else torch.stack([torch.eye(4).roll(i, 0) for i in range(3)])

    def drawn(labels, latent, mask):
        sockets = Sockets(entries(sampler, labels), latent_image=latent, mask=mask)
        return running.run(entry, loaded, settings, 3, sockets).result[0]

    batch = drawn((1, 4, 2), {"samples": start}, masks)
    assert "batch_index" not in batch
    for places in ([0], [1, 2], [2, 0]):
        latent = {"samples": start[places], "batch_index": places}
        part = drawn((1, 4, 2), latent, masks)
        torch.testing.assert_close(part["samples"], batch["samples"][places], rtol=1e-4, atol=1e-4)
        assert part["batch_index"] == places, "the next sampler needs it too"

        # Labels and masks of these images alone.
        own = drawn([(1, 4, 2)[i] for i in places], latent, masks[places])
        assert torch.equal(own["samples"], part["samples"])

    # One label for every image, as in a graph that rebatches one by one.
    apart = [drawn((1,), {"samples": start[:1], "batch_index": [i]}, masks[:1])["samples"] for i in range(3)]
    assert not torch.equal(apart[0], apart[1]) and not torch.equal(apart[1], apart[2])


@pytest.mark.parametrize("sampler", BATCHES)
def test_an_image_of_a_batch_is_drawn_alone_by_its_number(sampler):
    model, _ = BATCHES[sampler]
    loaded = model()
    entry = SAMPLERS[sampler]
    few = {"steps": 3, "diffusion_steps": 3}
    settings = settings_from(
        entry.settings, {name: count for name, count in few.items() if name in knobs(entry.settings)}
    )

    def drawn(labels, first=0, **latent):
        sockets = Sockets(entries(sampler, labels), first_image=first, **latent)
        return running.run(entry, loaded, settings, 3, sockets).result[0]

    batch = drawn((1, 4, 2))
    assert "batch_index" not in batch
    for first, labels in ((2, (2,)), (1, (4, 2))):
        part = drawn(labels, first)
        torch.testing.assert_close(part["samples"], batch["samples"][first:], rtol=1e-4, atol=1e-4)
        assert part["batch_index"] == list(range(first, 3))
    assert not torch.equal(drawn((2,))["samples"], drawn((2,), 2)["samples"])

    # What inpaints it goes on with its noise, and cannot be told another number.
    made = drawn((2,), 2)
    edit = {"latent_image": {**made, "samples": torch.ones_like(made["samples"])}, "mask": torch.ones(1, 4, 4)}
    torch.testing.assert_close(drawn((2,), **edit)["samples"], batch["samples"][2:], rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match="^first_image: the value is .*, but latent_image already states"):
        drawn((2,), 1, **edit)


@pytest.mark.parametrize("value", [-1, 1.5, True, "2", 10**8])
def test_the_number_of_an_image_is_checked(value):
    with pytest.raises(UserError, match="^first_image: "):
        samplers.MARSampler.execute(model=a_mar(), condition=from_ids((1,)), seed=3, first_image=value)
    with pytest.raises(UserError, match="^first_image: "):
        a_prompt(images=1, first_image=value)


def test_codes_of_an_image_of_a_batch_are_made_alone_by_its_number():
    whole = a_prompt(images=3)
    alone = a_prompt(images=1, first_image=2)
    assert torch.equal(alone.codes[0], whole.codes[2]) and not torch.equal(alone.codes[0], whole.codes[0])


@pytest.mark.parametrize(("latents", "index", "labels", "field"), [
    (1, [5], (1, 4, 7), "condition"),
    (1, [3], (1, 4, 7), "condition"),
    (2, [0], (1, 4), "latent_image"),
    (2, [0, -1], (1, 4), "latent_image"),
    (2, [0, 1.5], (1, 4), "latent_image"),
    (2, 7, (1, 4), "latent_image"),
])  # fmt: skip
def test_places_that_do_not_fit_are_refused(latents, index, labels, field):
    latent = {"samples": torch.zeros(latents, 2, 4, 4), "batch_index": index}
    with pytest.raises(UserError, match=f"^{field}: "):
        checked("mar", a_mar(), FEW, condition=from_ids(labels), latent_image=latent, mask=torch.ones(1, 4, 4))


def test_the_mask_of_a_place_is_the_mask_of_that_number():
    """Three masks have one for place 2, and none for place 3."""
    masks = torch.stack([torch.eye(4).roll(i, 0) for i in range(3)])
    latent = {"samples": torch.zeros(1, 2, 4, 4), "batch_index": [2]}
    found = checked("mar", a_mar(), FEW, condition=from_ids((1,)), latent_image=latent, mask=masks)
    assert torch.equal(found.edit.mask, masks[2:])
    with pytest.raises(UserError, match="^mask: its batch has 3 entries"):
        checked("mar", a_mar(), FEW, condition=from_ids((1,)), latent_image=latent | {"batch_index": [3]}, mask=masks)


def core_empty(width: int, height: int, batch_size: int = 1, **more) -> dict:
    """What core's Empty Latent Image makes, of Stable Diffusion's shape."""
    return {"samples": torch.zeros(batch_size, 4, height // 8, width // 8), "downscale_ratio_spacial": 8, **more}


def drawn_from(latent, *labels, model=None, sampler="mar") -> torch.Tensor:
    sockets = Sockets(entries(sampler, labels), latent_image=latent)
    entry = SAMPLERS[sampler]
    few = {"steps": 2, "diffusion_steps": 2}
    settings = settings_from(entry.settings, {name: few[name] for name in few if name in knobs(entry.settings)})
    return running.run(entry, model or a_mar(), settings, 3, sockets).result[0]["samples"]


@pytest.mark.parametrize("sampler", BATCHES)
def test_an_empty_latent_is_a_size_and_a_number_of_images(sampler):
    """As for core's samplers. The models draw 16 pixels or 8."""
    model = BATCHES[sampler][0]()
    side = model.vae.sizes[0][0]

    def drawn(latent, *labels):
        return drawn_from(latent, *labels, model=model, sampler=sampler)

    wanted = drawn(None, 1, 1, 1)
    assert torch.equal(drawn(core_empty(side, side), 1, 1, 1), wanted), "one latent for all labels"
    assert torch.equal(drawn(core_empty(side, side, 3), 1), wanted), "one label for all latents"
    assert torch.equal(drawn(core_empty(side, side, 3), 1, 1, 1), wanted)

    # Core's Latent From Batch, and Latent Batch Seed Behavior at fixed.
    last = drawn(core_empty(side, side, 2, batch_index=[1, 2]), 1)
    torch.testing.assert_close(last, wanted[1:], rtol=1e-4, atol=1e-4)
    same = drawn(core_empty(side, side, 2, batch_index=[2, 2]), 1)
    torch.testing.assert_close(same, wanted[[2, 2]], rtol=1e-4, atol=1e-4)

    # A label of the whole batch for each, or as many labels as latents.
    three = drawn(None, 1, 4, 2)
    for labels in ((1, 4, 2), (4, 2)):
        part = drawn(core_empty(side, side, 2, batch_index=[1, 2]), *labels)
        torch.testing.assert_close(part, three[1:], rtol=1e-4, atol=1e-4)


def test_what_size_an_empty_latent_asks_for():
    model = a_mar()
    wanted = drawn_from(None, 1)
    sizes = {
        "decoded pixels": core_empty(16, 16),
        "by another stride": {"samples": torch.zeros(1, 128, 1, 1), "downscale_ratio_spacial": 16},
        "of older nodes, 8 pixels": {"samples": torch.zeros(1, 4, 2, 2)},
        "the model's own latents": {"samples": torch.zeros(1, 2, 4, 4)},
        "one frame": {"samples": torch.zeros(1, 16, 1, 2, 2), "downscale_ratio_spacial": 8},
    }
    for name, latent in sizes.items():
        assert torch.equal(drawn_from(latent, 1, model=model), wanted), name

    # A decoder that enlarges: 32 pixels are drawn, of latents of 16.
    model.vae.upscale_ratio = 8
    for side in (16, 32):
        assert checked("mar", model, FEW, latent_image=core_empty(side, side)).edit is None, side
    with pytest.raises(
        UserError, match="^latent_image: .* 64 x 48 pixels, .* 32 x 32 pixels .*; set width to 32 and height to"
    ):
        checked("mar", model, FEW, latent_image=core_empty(64, 48))


@pytest.mark.parametrize(("sampler", "make", "usual"), [("bitdance", a_block, 8), ("nextstep", a_square, 16)])
def test_a_size_that_the_sampler_sets_names_its_numbers(sampler, make, usual, monkeypatch):
    model = make()
    monkeypatch.setattr(model.vae, "sizes", ((usual, usual), (16, 8)))
    here = f"{usual} x {usual} pixels with these settings; set width to 8 and height to"
    with pytest.raises(UserError, match=f"^latent_image: .* 8 x 16 pixels, .* {here}"):
        drawn_from(core_empty(8, 16), 1, model=model, sampler=sampler)


@pytest.mark.parametrize(("latent", "labels"), [
    (core_empty(16, 16, 3), (1, 2)),
    (core_empty(16, 16, 2), (1, 2, 3)),
    (core_empty(16, 16, 3, batch_index=[0, 1, 2]), (1, 2)),
])  # fmt: skip
def test_as_many_images_as_an_empty_latent_asks_for_or_one(latent, labels):
    wanted = f"^latent_image: the batch_size of the empty latent is .* the condition asks for {len(labels)} images; "
    with pytest.raises(UserError, match=wanted):
        drawn_from(latent, *labels)


def test_an_empty_latent_with_a_mask_is_an_image_to_inpaint():
    for latent, mask in (({"noise_mask": torch.ones(1, 4, 4)}, None), ({}, torch.ones(1, 4, 4))):
        given = {"samples": torch.zeros(1, 2, 4, 4), **latent}
        assert checked("mar", a_mar(), FEW, latent_image=given, mask=mask).edit is not None
    with pytest.raises(UserError, match="^mask: inpainting needs a mask; "):
        checked("mar", a_mar(), FEW, latent_image={"samples": torch.full((1, 2, 4, 4), 1e-3)})


def test_one_label_is_for_every_image_of_a_latent():
    """As core repeats a conditioning: several images are inpainted with one label."""
    start = torch.randn(3, 2, 4, 4)
    latent = {"samples": start}
    one, three = (checked("mar", a_mar(), FEW, condition=from_ids(labels), latent_image=latent, mask=torch.eye(4)[None])
                  for labels in ([4], [4, 4, 4]))  # fmt: skip
    assert one.condition == three.condition and torch.equal(one.edit.start, start)
    assert list(one.numbers) == list(three.numbers) == [0, 1, 2]


def test_as_many_masks_and_labels_as_latents_are_in_the_order_of_the_latents():
    """Also of a batch whose images are in another order, where a place could be taken for that of a mask."""
    masks = torch.stack([torch.eye(4), torch.eye(4).roll(1, 0)])
    latent = {"samples": torch.zeros(2, 2, 4, 4), "batch_index": [1, 0]}
    found = checked("mar", a_mar(), FEW, condition=from_ids((5, 6)), latent_image=latent, mask=masks)
    assert torch.equal(found.edit.mask, masks) and found.condition.digests() == from_ids((5, 6)).digests()
    assert list(found.numbers) == [1, 0]


def test_the_report_says_what_decodes_the_latent_and_which_run_it_is_of(monkeypatch):
    monkeypatch.setattr(fake_comfy.state, "context", SimpleNamespace(prompt_id="run 7"))
    latent, report = running.run(SAMPLERS["mar"], a_mar(), FEW, 3, Sockets(LABELS)).result
    # 17 bytes of fp32, 8 channels, 4 x 4 latent positions of 4 x 4 pixels.
    assert kind_of(latent["samples"]) == KL and report.memory[DECODE] == 17 * 8 * 16 * 16 * 4
    assert report.prompt == "run 7"
    latent, report = running.run(SAMPLERS["llamagen"], a_gpt(), LlamaGenSettings(), 3, Sockets(LABELS)).result
    assert kind_of(latent["samples"]) == VQ and DECODE not in report.memory


def test_the_plain_sampler_of_a_model():
    assert [running.baseline_of(one) for one in (a_mar(), a_gpt(), a_gpt(special=3), a_block(), a_nextstep())] == [
        "mar",
        "llamagen",
        "par",
        "bitdance",
        "nextstep",
    ]
    shared = running.baseline_choice(choose("zipar", {"cfg": 2.0, "window": 3}), a_gpt())
    assert shared.entry.name == "llamagen" and shared.values == {"cfg": 2.0}


def test_room_for_previews_is_of_four_images_at_most(monkeypatch):
    loaded = a_mar()
    one = 17 * 8 * 16 * 16 * 4
    for images, counted in ((1, 1), (3, 3), (9, 4)):
        to_device(loaded, 10.0, (images, 2, 4, 4))
        patchers, about = fake_comfy.state.loaded[-1]
        assert patchers == [loaded.patcher, loaded.vae.patcher] and about["memory_required"] == 10 + counted * one
    load_to_device(loaded, 11.0)
    assert fake_comfy.state.loaded[-1][1]["memory_required"] == 11.0


def test_there_are_no_previews_where_the_decoder_does_not_fit_beside_the_model(monkeypatch):
    """Otherwise weights of the model would stay in main memory for the sake of previews."""
    loaded = a_mar()
    nets = (loaded.model.net, loaded.vae.first_stage_model)
    weights = sum(weight.nbytes for net in nets for weight in net.parameters())
    decoding = 17 * 8 * 16 * 16 * 4
    need = weights + 10 + decoding

    monkeypatch.setattr(host.devices.mm, "get_total_memory", lambda device: need)
    assert to_device(loaded, 10.0, (1, 2, 4, 4)) is loaded.vae
    monkeypatch.setattr(host.devices.mm, "get_total_memory", lambda device: need - 1)
    assert to_device(loaded, 10.0, (1, 2, 4, 4)) is None
    patchers, about = fake_comfy.state.loaded[-1]
    assert patchers == [loaded.patcher] and about["memory_required"] == 10.0

    Progress.updates.clear()
    tiny.sample(samplers.MARSampler, model=loaded)
    assert Progress.updates and all(shown is None for _, _, shown in Progress.updates)


def test_a_cached_model_is_dropped_when_its_own_weights_are_unloaded():
    device = torch.device("cpu")
    cache = ModelCache(lambda: device, lambda: device)
    first, second = (SimpleNamespace(net=torch.nn.Linear(1, 1)) for _ in range(2))
    old = cache.get("a", lambda: first)
    assert cache.get("a", lambda: second) is old
    new = cache.get("b", lambda: second)
    assert new.model is second
    old.patcher.detach()  # it is gone already
    assert cache.get("b", lambda: first) is new
    new.patcher.detach()
    assert cache.get("b", lambda: first).model is first


def test_a_cached_model_lives_until_core_has_let_go_of_it(monkeypatch):
    """Core reads the patcher after the callback. Freed before, its record leaves the list that core walks over."""
    device = torch.device("cpu")
    cache = ModelCache(lambda: device, lambda: device)
    patcher = weakref.ref(cache.get("a", lambda: SimpleNamespace(net=torch.nn.Linear(1, 1))).patcher)

    class LoadedModel:
        """Core's record of a model, which does not hold it."""

        model = property(lambda self: patcher())

    record = LoadedModel()
    monkeypatch.setattr(host.devices.mm, "current_loaded_models", [record])

    record.model.detach()
    assert record.model is patcher() is not None
    host.devices.mm.current_loaded_models.remove(record)
    del record
    assert patcher() is None


def test_what_a_node_sees_of_its_graph():
    prompt = {
        "3": {"class_type": "FastARClassLabel", "inputs": {"labels": "cat", "list": [1, 2, 3], "pair": [0.5, 0]}},
        "4": {"class_type": "A", "inputs": {"condition": ["3", 0], "model": ["9", 0]}},
        "5": {"class_type": "B", "inputs": {"condition": ["3", 1], "report": ["4", 1]}},
        "6": {"class_type": "C", "inputs": {"condition": ["33", 0]}},
    }

    def node(number):
        return SimpleNamespace(hidden=SimpleNamespace(unique_id=number, prompt=prompt))

    assert graph.users(node("3"), "condition") == [prompt["4"]["inputs"]]
    assert [graph.taken(node("3"), k) for k in range(3)] == [True, True, False]
    assert [graph.taken(node("4"), k) for k in range(2)] == [False, True]
    assert graph.typed(node("3"), "labels") == "cat" and graph.typed(node("3"), "other") is None
    assert [graph.maker(node(n), "condition") for n in "456"] == ["FastARClassLabel"] * 2 + [""]
    assert [graph.source_of(v) for v in (["3", 1], [1, 2, 3], [0.5, 0], "3")] == [("3", 1), None, None, None]
