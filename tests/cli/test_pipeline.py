"""The pipeline on random weights of every family: the images of the command line, edits, decoding, and mistakes."""

import numpy as np
import pytest
import torch
from fastar_nodes import Edit, PairedNoise, UserError, finish, load, load_kl, load_vq, mar, resolve
from fastar_nodes.cli import compare as command
from fastar_nodes.cli import planning
from fastar_nodes.runs import inpainting, loading
from fastar_nodes.runs.registry import LLAMAGEN, MAR, SAMPLERS, TAR
from fastar_nodes.samplers.settings import knobs
from PIL import Image
from tiny_files import write_gpt

LATENTS = torch.zeros(1, 4, 4, 4)
PIXELS = np.zeros((4, 4, 3), np.uint8)
QUICK = {"steps": 6, "diffusion_steps": 6}
SETS = "--set diffusion_steps=6 --set steps=6"
# Files of load(), arguments of a call, and the line of the command that draws the same.
SAME = {
    "mar": (
        {"model": "mar", "decoder": "kl"},
        {"prompt": ["cat", 3], "images": 2, "sampler": "fasthybrid", "preset": "balanced", "cfg": 2.5, **QUICK},
        f"--model {{mar}} --decoder {{kl}} --label cat,3 --batch 2 --samplers fasthybrid {SETS} "
        "--set preset=balanced --set cfg=2.5",
    ),
    "cspd": (
        {"model": "mar", "decoder": "kl", "draft": "mar"},
        {"prompt": "cat, boat", "sampler": "lazymar+cspd", "preset": "fast", **QUICK},
        f"--model {{mar}} --decoder {{kl}} --draft {{mar}} --label cat,boat --samplers cspd+lazymar {SETS} "
        "--set preset=fast",
    ),
    "hybrid": (
        {"model": "hybrid", "decoder": "kl"},
        {"prompt": ["red boat", "tree"], "negative": "Draw nothing.", **QUICK},
        f"--model {{hybrid}} --decoder {{kl}} --prompt 'red boat' --prompt tree --negative 'Draw nothing.' "
        f"--samplers mar {SETS}",
    ),
    "llamagen": (
        {"model": "llamagen", "decoder": "vq"},
        {"prompt": "cat", "images": 3, "sampler": "zipar", "window": 2, "temperature": 0.9},
        "--model {llamagen} --decoder {vq} --label cat --batch 3 --samplers zipar --set window=2 --set temperature=0.9",
    ),
    "par": (
        {"model": "par", "decoder": "vq"},
        {"prompt": "cat"},
        "--model {par} --decoder {vq} --label cat --samplers par",
    ),
    "tar": (
        {"model": "high", "decoder": "vq", "tar": "tar", "ta_tok": "ta_tok"},
        {"prompt": "a red boat", "images": 2, "sampler": "tar", "prompt_settings": {"temperature": 0.5}},
        "--model {high} --decoder {vq} --tar {tar} --ta-tok {ta_tok} --prompt 'a red boat' --batch 2 --samplers tar "
        "--set prompt.temperature=0.5",
    ),
    "mulosd": (
        {"model": "high", "decoder": "vq", "tar": "tar", "ta_tok": "ta_tok", "draft": "low"},
        {"prompt": "a red boat", "sampler": "mulosd", "preset": "balanced"},
        "--model {high} --decoder {vq} --tar {tar} --ta-tok {ta_tok} --draft {low} --prompt 'a red boat' "
        "--samplers mulosd --set preset=balanced",
    ),
}


@pytest.fixture
def pipeline(files, tiny_demo):
    """load() on tiny files, by their names in ``files``."""
    return lambda **named: load(
        **{key: getattr(files, name) for key, name in named.items()}, device="cpu", dtype="fp32"
    )


@pytest.fixture(scope="module")
def of_mar(files):
    """A pipeline that no test changes."""
    return load(model=files.mar, decoder=files.kl, device="cpu", dtype="fp32")


@pytest.mark.parametrize("case", SAME)
@pytest.mark.fast_cases("mar")
def test_the_same_call_gives_the_images_of_the_command_line(case, cli, files, pipeline, monkeypatch):
    named, call, line = SAME[case]
    images, report = pipeline(**named)(**call, seed=11)

    drawn, reports = [], []
    decode = command.decode

    def recorded(ready, result):
        drawn.append(decode(ready, result))
        reports.append(result.report)
        return drawn[-1]

    monkeypatch.setattr(command, "decode", recorded)
    line = line.format(**files._asdict()).replace("\\", "/")
    assert cli(f"compare --device cpu --dtype fp32 --seed 11 {line}").code == 0
    assert all(isinstance(image, Image.Image) for image in images)
    assert np.array_equal(np.stack([np.asarray(image) for image in images]), drawn[0].numpy())
    assert (report.seed, report.sampler, report.settings) == (11, reports[0].sampler, reports[0].settings)
    assert report.counts == reports[0].counts and report.images == len(images)


@pytest.mark.parametrize("case", ["mar", "llamagen", "tar"])
@pytest.mark.fast_cases("mar")
def test_an_image_alone_is_that_of_the_batch(case, pipeline):
    named, call, _ = SAME[case]
    pipe = pipeline(**named)
    prompts = call["prompt"] if isinstance(call["prompt"], list) else [call["prompt"]]
    several, _ = pipe(**{**call, "prompt": prompts * 2, "images": 1}, seed=7)
    alone, _ = pipe(**{**call, "prompt": prompts[-1], "images": 1, "first": len(several) - 1}, seed=7)
    difference = abs(np.subtract(several[-1], alone[0], dtype=int))
    assert difference.max() <= (case == "mar"), "of the noise (seed, 1 or more); MAR's latents up to rounding"
    assert not np.array_equal(several[0], several[-1])


def test_without_a_seed_every_call_draws_another_image_and_the_report_names_its_seed(of_mar):
    first, report = of_mar.sample("cat", **QUICK)
    second, other = of_mar.sample("cat", **QUICK)
    assert report.seed != other.seed and not torch.equal(first, second)
    assert f"seed {report.seed}" in str(report)

    again, _ = of_mar.sample("cat", seed=report.seed, **QUICK)
    assert torch.equal(first, again)


@pytest.mark.parametrize("case", ["mar", "hybrid", "llamagen", "mulosd"])
def test_a_pipeline_moves_to_another_device(case, pipeline, monkeypatch):
    """Every tensor of model and decoder, and what is loaded later: on "meta", which stands for a graphics card."""
    named, call, _ = SAME[case]
    pipe = pipeline(**named)
    expected = pipe.sample(**call, seed=7).latents

    meta = torch.device("meta")
    monkeypatch.setattr(loading, "choose_device", lambda name: torch.device(name))
    assert pipe.to("meta") is pipe and pipe.device == meta
    for owner in (pipe.model, pipe.decoder):
        nets = [value for value in vars(owner).values() if isinstance(value, torch.nn.Module)]
        assert nets and {t.device for net in nets for t in (*net.parameters(), *net.buffers())} == {meta}

    if case == "mulosd":
        draft = pipe.drafts.load("mulosd", pipe.ready)
        assert draft.device == meta, "a draft model that is loaded afterwards"
        assert pipe.readers.files.device == meta
    assert pipe.readers.files.dtype == "fp32", (
        "later files take the dtype that is there, not another device's usual one"
    )

    # And back: of a pipeline whose weights are still there.
    pipe = pipeline(**named)
    assert torch.equal(pipe.to("cpu").sample(**call, seed=7).latents, expected)


def test_a_device_that_cannot_be_used_leaves_the_pipeline_as_it_is(pipeline, monkeypatch):
    pipe = pipeline(**SAME["mar"][0])
    expected = pipe.sample("cat", seed=7, **QUICK).latents
    with pytest.raises(UserError, match="^device: abacus is not available here; choose one of cpu"):
        pipe.to("abacus")

    moved, own = [], pipe.decoder.net.to

    def full(device):
        moved.append(device)
        if len(moved) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return own(device)

    monkeypatch.setattr(pipe.decoder.net, "to", full)
    with pytest.raises(UserError, match="^device: cpu has too little memory for this model; choose a different"):
        pipe.to("cpu")
    assert moved == [torch.device("cpu")] * 2, "the weights that had moved are moved back"
    assert torch.equal(pipe.sample("cat", seed=7, **QUICK).latents, expected)


def test_the_pixels_of_an_image_do_not_depend_on_its_batch():
    """On the demo's decoder, whose channels are many enough that a batch is computed in another order than an image."""
    decoder = load_kl(resolve("demo-kl", "kl"))
    latents = torch.randn(3, 16, 8, 8, generator=torch.Generator().manual_seed(5))
    latents = latents[:, : decoder.net.config.z_channels]
    pixels = decoder.decode(latents)
    for i in range(3):
        assert torch.equal(decoder.decode(latents[i : i + 1])[0], pixels[i])


def test_latents_and_codes_are_decoded_by_pipeline_and_decoder(pipeline, files):
    for case, of_decoder in (("mar", load_kl(files.kl)), ("llamagen", load_vq(files.vq))):
        named, call, _ = SAME[case]
        pipe = pipeline(**named)
        latents, report = pipe.sample(**call, seed=7)
        images, _ = pipe(**call, seed=7)
        pixels = pipe.decode(latents)
        assert "decoder" not in report.phases and pixels.dtype == np.uint8
        assert np.array_equal(pixels, np.stack([np.asarray(image) for image in images]))
        assert np.array_equal(pixels, of_decoder.decode(latents).numpy())


@pytest.mark.parametrize(("wrong", "message"), [
    (torch.zeros(2, 3, 4, 4),
     r"^latents: the decoder reads latents of the shape \[batch, 4, height, width\], but it got \[2, 3"),
    (torch.zeros(0, 4, 4, 4), "^latents: the decoder reads"),
    ([1.0], "^latents: the decoder reads .* got list"),
    (torch.full((1, 4, 2, 2), torch.nan), "^latents: some numbers are not finite"),
])  # fmt: skip
def test_latents_that_cannot_be_decoded(files, wrong, message):
    with pytest.raises(UserError, match=message):
        load_kl(files.kl).decode(wrong)


@pytest.mark.parametrize(("wrong", "message"), [
    (torch.zeros(4, 4, dtype=torch.int64),
     r"^codes: the decoder reads codes of the shape \[batch, height, width\]"),
    (torch.full((1, 2, 2), -1), "^codes: some codes are outside the range of"),
    (torch.full((1, 2, 2), 1 << 40), "^codes: some codes are outside the range of"),
    (torch.zeros(1, 99, 2, 2), "^latents: the decoder reads"),
])  # fmt: skip
def test_codes_that_cannot_be_decoded(files, wrong, message):
    with pytest.raises(UserError, match=message):
        load_vq(files.vq).decode(wrong)


@pytest.mark.parametrize("case", ["mar", "llamagen"])
@pytest.mark.fast_cases(1)
def test_an_edit_keeps_what_the_mask_does_not_cover(case, pipeline):
    """The lower half of the tokens is sampled again: from latents, and from pixels by way of the encoder."""
    named, call, _ = SAME[case]
    pipe = pipeline(**named)
    call = {**call, "prompt": "cat", "images": 1}
    start, _ = pipe.sample(**call, seed=7)
    mask = Image.new("L", (8, 8))
    mask.paste(255, (0, 4, 8, 8))
    array = np.asarray(mask)
    half = start.shape[-2] // 2

    first, _ = pipe.sample(**{**call, "seed": 8}, image=start, mask=mask)
    assert torch.allclose(first[..., :half, :].float(), start[..., :half, :].float(), atol=1e-5)
    assert not torch.equal(first[..., half:, :], start[..., half:, :])
    for same in (array, array > 0, torch.tensor(array / 255.0)[None]):
        again, _ = pipe.sample(**{**call, "seed": 8}, image=start, mask=same)
        assert torch.equal(first, again)

    images, _ = pipe(**call, seed=7)
    encoded = pipe.encode(images[0])
    assert encoded.shape == start.shape and encoded.dtype == start.dtype
    kept, _ = pipe.sample(**{**call, "seed": 8}, image=images[0], mask=mask)
    assert torch.allclose(kept[..., :half, :].float(), encoded[..., :half, :].float(), atol=1e-5)
    assert pipe.encode(images[0].resize((50, 30))).shape == start.shape, "scaled to the model's size"


@pytest.mark.parametrize("code", [-1, 1 << 20])
def test_an_edit_of_codes_that_the_decoder_has_not(code, pipeline):
    """Also where the mask does not cover it: a negative code would be sampled again."""
    named, call, _ = SAME["llamagen"]
    pipe = pipeline(**named)
    call = {**call, "prompt": "cat", "images": 1}
    codes, _ = pipe.sample(**call, seed=7)
    mask = np.zeros(codes.shape[-2:], bool)
    mask[0, 0] = True
    codes[0, 1, 1] = code
    with pytest.raises(UserError, match="^image: some codes are outside the range of"):
        pipe.sample(**{**call, "seed": 8}, image=codes, mask=mask)


def test_an_edit_takes_images_from_files_and_lists(pipeline, tmp_path):
    """A call returns a list of images, which is what the next call starts from."""
    pipe = pipeline(**SAME["mar"][0])
    images, _ = pipe(["cat", "boat"], seed=7, **QUICK)
    mask = Image.new("L", images[0].size)
    mask.paste(255, (0, 0, 4, 8))
    images[0].save(tmp_path / "image.png")
    mask.save(tmp_path / "mask.png")

    wanted = pipe.sample("cat", seed=8, image=images[0], mask=mask, **QUICK).latents
    array = np.asarray(mask)
    pairs = [
        (tmp_path / "image.png", tmp_path / "mask.png"),
        (str(tmp_path / "image.png"), [mask]),
        ([images[0]], array[:, ::-1][:, ::-1]),
        (np.asarray(images[0]), array // 255),
    ]
    for image, same in pairs:
        assert torch.equal(pipe.sample("cat", seed=8, image=image, mask=same, **QUICK).latents, wanted)

    both = pipe.sample(["cat", "boat"], seed=8, image=images, mask=[mask, mask], **QUICK).latents
    torch.testing.assert_close(both[:1], wanted, rtol=1e-4, atol=1e-4)
    flipped = np.asarray(images[0])[::-1]
    assert torch.equal(pipe.encode(flipped), pipe.encode(Image.fromarray(np.ascontiguousarray(flipped))))


@pytest.mark.parametrize("case", ["mar", "llamagen"])
@pytest.mark.fast_cases(1)
def test_an_image_of_any_size_keeps_its_size_and_what_is_not_masked(case, pipeline):
    """The model sees a square around the mask; the images are those of the functions below."""
    named, call, _ = SAME[case]
    pipe = pipeline(**named)
    call = {**call, "prompt": "cat", "images": 2, "seed": 8}
    pixels = np.random.default_rng(1).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    mask = np.zeros((60, 90), np.uint8)
    mask[20:40, 30:54] = 255

    images, _ = pipe(**call, image=Image.fromarray(pixels), mask=mask)
    painted = torch.from_numpy(mask)[None] / 255
    crop = inpainting.crop_around(painted)
    assert (crop.width, crop.height) == (30, 30)

    latents, _ = pipe.sample(**call, image=pixels[15:45, 27:57], mask=mask[15:45, 27:57])
    drawn = torch.from_numpy(pipe.decode(latents)).movedim(-1, 1) / 255
    original = torch.from_numpy(pixels).movedim(-1, 0)[None] / 255
    wanted = inpainting.put_back(original, drawn, painted, crop).movedim(1, -1).clamp(0, 1)
    outside = inpainting.faded(painted, 3)[0] == 0
    for image, one in zip(images, wanted, strict=True):
        array = np.asarray(image)
        assert np.array_equal(array, (one * 255).round().byte().numpy())
        assert np.array_equal(array[outside], pixels[outside]) and not np.array_equal(array, pixels)

    with pytest.raises(UserError, match="^mask: it is empty; paint over the area"):
        pipe(**call, image=pixels, mask=mask * 0)
    with pytest.raises(UserError, match=r"^image: the array has the dtype float64 and the shape \[60, 90, 3\]"):
        pipe(**call, image=pixels / 255, mask=mask)


def test_class_ids_of_numpy_and_torch(of_mar):
    wanted = of_mar.sample([3, 4], seed=7, **QUICK).latents
    for ids in (np.array([3, 4]), [np.int64(3), np.uint8(4)], torch.tensor([3, 4]), iter((3, 4))):
        assert torch.equal(of_mar.sample(ids, seed=7, **QUICK).latents, wanted)
    one, same = (of_mar.sample(label, seed=7, **QUICK).latents for label in (np.int64(3), 3))
    assert torch.equal(one, same)


def test_values_that_take_no_memory_until_they_are_read(of_mar, pipeline):
    """Of stride 0, as expand() makes them: 300 TB, more than any process can address."""
    pixels = np.broadcast_to(np.zeros((1, 1, 1, 3), np.uint8), (1, 10**7, 10**7, 3))
    for pipe in (of_mar, pipeline(model="llamagen", decoder="vq")):
        with pytest.raises(UserError, match="^image: there is not enough memory to encode the image"):
            pipe.encode(pixels)

    latents = torch.zeros(1, 1, 1, 1).expand(1, of_mar.model.net.config.channels, 10**7, 10**7)
    with pytest.raises(UserError, match="^memory: there is not enough memory to decode even a single image"):
        of_mar.decode(latents)


def test_a_low_level_edit_is_the_pipelines(pipeline):
    named, _, _ = SAME["mar"]
    pipe = pipeline(**named)
    start, _ = pipe.sample("cat", seed=7, **QUICK)
    mask = torch.zeros(1, 4, 4)
    mask[:, 2:] = 1
    settings = pipe.settings("mar", **QUICK)
    sampler = mar(pipe.model, pipe.condition("boat"), settings, PairedNoise(3, range(1)), edit=Edit(start, mask))
    expected, _ = pipe.sample("boat", seed=3, image=start, mask=mask, **QUICK)
    assert torch.equal(finish(sampler).latents, expected)


def test_the_callback_gets_every_step(pipeline):
    named, call, _ = SAME["mar"]
    seen = []
    pipeline(**named)(**call, callback=lambda step: seen.append((step.done, step.total, step.latents.shape)))
    assert [done for done, _, _ in seen] == [1, 2, 3, 4, 5, 6]
    assert {(total, shape) for _, total, shape in seen} == {(6, (4, 4, 4, 4))}


def test_samplers_of_each_model(pipeline):
    names = {case: pipeline(**SAME[case][0]).samplers for case in ("mar", "llamagen", "par", "tar", "hybrid")}
    assert names["par"] == ["par"] and names["mar"] == names["hybrid"]
    for case, family in (("mar", MAR), ("llamagen", LLAMAGEN), ("tar", TAR)):
        assert names[case] == [name for name, e in SAMPLERS.items() if family in e.families and name != "par"], case


def test_presets_and_settings(pipeline):
    """The demo's values of FastHybrid; the tiny model states the demo's labels."""
    pipe = pipeline(**SAME["mar"][0])
    found = pipe.presets("fasthybrid")
    assert {*found} == {"exact", "balanced", "fast"} and found["exact"] == {"lookahead": 0}
    assert found["balanced"] == {"threshold": 0.99, "lookahead": 8, "guided_steps": 5, "lookahead_start": 4}
    settings = pipe.settings("fasthybrid", "balanced", threshold=0.5)
    assert (settings.threshold, settings.lookahead) == (0.5, 8)
    assert pipe.settings().steps == 16, "the demo's 32, at most the number of tokens"


def test_without_a_preset_python_and_the_command_line_have_the_same_settings(pipeline):
    pipe = pipeline(**SAME["mar"][0])
    for name in ("mar", "fasthybrid", "lazymar", "fasthybrid+lazymar", "cspd"):
        (planned,) = planning.plan(name, [], {name: pipe.ready})
        assert pipe.settings(name) == planned.settings, name
    assert pipe.settings("fasthybrid").threshold != pipe.settings("fasthybrid", "custom").threshold


def test_no_setting_has_the_name_of_an_argument():
    own = {"prompt", "sampler", "preset", "seed", "images", "first", "negative", "image", "mask", "callback"}
    for entry in SAMPLERS.values():
        assert not own & {*knobs(entry.settings)}


@pytest.mark.parametrize(("wrong", "message"), [
    ({"sampler": "fasthybird"},
     "^sampler: there is no sampler 'fasthybird'; did you mean fasthybrid. Choose one of mar, fast"),
    ({"sampler": "zipar"},
     r'^sampler: zipar works with a LlamaGen .* load\("demo-llamagen"\), or choose one of mar, fast'),
    ({"preset": "balancd"},
     "^preset: there is no preset 'balancd'; did you mean balanced. Choose one of balanced, fast, exact"),
    ({"preset": None}, "^preset: there is no preset None; choose one of balanced"),
    ({"sampler": "fasthybrid", "threshhold": 1},
     "^threshhold: fasthybrid has no such setting; did you mean threshold. Choose one of"),
    ({"window": 4}, "^window: mar has no such setting; choose one of steps, "),
    ({"cfg": "much"}, "^cfg: 'much' is not a number"),
    ({"seed": -1}, "^seed: -1 is outside 0 to 18446744073709551615"),
    ({"seed": 1.5}, "^seed: 1.5 is not a whole number"),
    ({"images": 0}, "^images: 0 is outside 1 to 1024"),
    ({"first": -1}, "^first: -1 is outside"),
    ({"prompt": "dog"}, "^prompt: there is no class 'dog'"),
    ({"prompt": []}, "^prompt: it is empty"),
    ({"prompt": ["cat"] * 600, "images": 2}, "^batch: 1200 images .* 1024"),
    ({"negative": "Draw."}, "^negative: .*Harmon, UniPic and NextStep.* tiny mar reads only class labels"),
    ({"prompt_settings": {"top_k": 1}}, "^prompt_settings: these settings are for Tar's language model"),
    ({"mask": np.zeros((4, 4))}, "^mask: inpainting needs both"),
    ({"image": np.zeros((8, 8, 3), np.uint8)}, "^mask: inpainting needs both"),
    ({"image": np.zeros((8, 8)), "mask": np.ones((4, 4))}, "^image: the array has the dtype float64"),
    ({"image": torch.zeros(1, 4, 4, dtype=torch.int64), "mask": np.ones((4, 4))}, "^image: .* torch.int64"),
    ({"image": torch.zeros(1, 4, 4, 4), "mask": np.zeros((4, 4))}, "^mask: it is empty"),
    ({"image": LATENTS, "mask": np.ones((64, 64, 3))}, "^mask: its batch has 64 entries, .* without channels"),
    ({"image": LATENTS, "mask": np.ones((64, 64, 1))}, "^mask: its batch has 64 entries, .* without channels"),
    ({"image": LATENTS, "mask": np.ones((4, 64, 64, 3))}, r"^mask: the array has the dtype .*"),
    ({"image": LATENTS, "mask": np.ones((3, 4, 4)), "images": 2}, "^mask: its batch has 3 entries, .* for 2 images"),
    ({"image": LATENTS.expand(5, 4, 4, 4), "mask": np.ones((4, 4)), "images": 2}, "^latent_image: its batch has 5"),
    ({"image": LATENTS, "mask": "no such mask.png"}, "^mask: no such mask.png cannot be read as an image"),
    ({"image": LATENTS, "mask": np.array(["a"])}, "^mask: it is an array of <U1"),
    ({"image": LATENTS, "mask": torch.ones(4, 4, dtype=torch.complex64)}, "^mask: the array has the dtype torch.comp"),
    ({"image": LATENTS, "mask": torch.ones(1).expand(1 << 20, 1 << 30)}, "^mask: there is not enough memory"),
    ({"image": [], "mask": np.ones((4, 4))}, "^image: the list is empty"),
    ({"image": [PIXELS, PIXELS[1:]], "mask": np.ones((4, 4))}, "^image: the images have different"),
    ({"image": 5, "mask": np.ones((4, 4))}, "^image: it is a int"),
    ({"prompt": None}, "^prompt: None is neither a text nor a class id"),
    ({"prompt": 3.0}, "^prompt: 3.0 is neither"),
    ({"prompt": ["cat", None]}, r"^prompt: \['cat', None\] is neither"),
    ({"steps": 17}, "^steps: 17 is outside 1 to 16"),
    ({"sampler": "cspd"}, r"^draft: cspd needs a small draft model .*draft= in Python"),
])  # fmt: skip
def test_a_wrong_argument_is_one_sentence(of_mar, wrong, message):
    with pytest.raises(UserError, match=message):
        of_mar(**{"prompt": "cat", **wrong})


def test_wrong_arguments_of_models_that_read_prompts(pipeline):
    tar, hybrid = pipeline(**SAME["tar"][0]), pipeline(**SAME["hybrid"][0])
    with pytest.raises(
        UserError, match="^detial: Tar's language model has no such setting; did you mean detail. Choose one of"
    ):
        tar("a boat", prompt_settings={"detial": 81})
    with pytest.raises(UserError, match="^prompt: 3 is not a text, but tiny hybrid reads prompts"):
        hybrid([3])
    with pytest.raises(UserError, match="^mask: mulosd samples whole images only"):
        tar("a boat", sampler="mulosd", image=np.zeros((8, 8, 3), np.uint8), mask=np.ones((4, 4)))


@pytest.mark.parametrize(("more", "message"), [
    ({"speed": "fast"}, "^speed: 'fast' is unknown; choose one of auto, plain, compile"),
    ({"weights": "emma"}, "^weights: 'emma' is unknown; did you mean ema. Choose one of"),
    ({"grid": 1}, "^grid: 1 is outside 2 to 128"),
    ({"grid": 8}, "^grid: tiny mar does not use this option, because a MAR has only one grid"),
    ({"tar": "demo-tar"}, "^tar: tiny mar does not use this option"),
    ({"encoder": "x"}, "^encoder: tiny mar does not use this option"),
    ({"device": "meta"}, "^device: meta is not available here"),
    ({"dtype": torch.float64}, "^dtype: FastAR cannot load .* in 'torch.float64'"),
    ({"model": "demo-kl.pth"}, "^checkpoint: "),
    ({"model": "tar-1.5b"}, r'^model: tar-1.5b .*load\("ar-dtok-512", tar="tar-1.5b"\)'),
])  # fmt: skip
@pytest.mark.fast_cases(every=3)
def test_a_wrong_argument_of_load_is_one_sentence(files, tmp_path, more, message):
    with pytest.raises(UserError, match=message):
        load(**{"model": files.mar, "decoder": files.kl, "device": "cpu", "models": tmp_path, **more})


def test_a_torch_dtype_and_a_grid_are_understood(files, tmp_path):
    half = load(files.mar, decoder=files.kl, device="cpu", dtype=torch.bfloat16)
    assert torch.bfloat16 in {weight.dtype for weight in half.model.net.parameters()}
    path = write_gpt(tmp_path / "gpt.safetensors", 3, 8)
    pipe = load(path, decoder=files.vq, device=torch.device("cpu"), grid=4)
    assert pipe.sample("cat").latents.shape == (1, 4, 4)
