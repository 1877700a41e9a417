"""BitDance's sampler: switches that change nothing, batches, annealed steps, edits, sizes and refusals."""

import math
from dataclasses import replace

import pytest
import torch
from block_models import bits, text_bitdance, tiny_bitdance
from fastar_nodes.errors import UserError
from fastar_nodes.networks.bitdance import BlockModel, block_order
from fastar_nodes.runs import batches
from fastar_nodes.samplers.blocks import bitdance as module
from fastar_nodes.samplers.blocks import canvas as canvases
from fastar_nodes.samplers.blocks import checks
from fastar_nodes.samplers.blocks.bitdance import bitdance, noise_in_order
from fastar_nodes.samplers.blocks.diffusion import head_calls
from fastar_nodes.samplers.blocks.settings import BlockSettings
from fastar_nodes.samplers.conditioning import PromptCondition, from_ids
from fastar_nodes.samplers.editing import Edit
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.noise import PairedNoise
from stepping import stepped

FEW = BlockSettings(diffusion_steps=4, cfg=2.0)
SPECULATIVE = replace(FEW, diffusion_steps=12, speculation=3)


@pytest.fixture(scope="module")
def model() -> BlockModel:
    return tiny_bitdance()


def draw(model, settings=FEW, images=(0,), labels=(1,), seed=5, **more):
    condition = from_ids(labels) if model.condition == "class" else PromptCondition(labels)
    return finish(bitdance(model, condition, settings, PairedNoise(seed, images), **more))


# ------------------------------------------------------------------------------------------------ arithmetic


def test_the_steps_by_hand():
    """Two steps: t = 0 and 0.475, dt = 0.475. a = 1 - dt ((1 + t) / (1 - t) + 1), b = dt (1 + t) / (1 - t)."""
    found = head_calls(2)
    numbers = [(step.x_coefficient, step.data_coefficient, math.exp(step.log_std_middle)) for step in found.steps]
    assert found.times == pytest.approx((0.0, 0.475, 0.95))
    assert numbers[0] == pytest.approx((0.05, 0.475, 0.974679434))
    assert numbers[1] == pytest.approx((-0.809523810, 1.334523810, 0.706222911))
    assert numbers[2] == (0, 1, 0), "the prediction"
    assert all(step.data_x == step.log_std_per_logit == 0 and step.data_per_prediction == 1 for step in found.steps)


def test_a_time_shift_moves_all_times_but_the_last_evaluation():
    """s(t) = t / (t + 2 (1 - t)): 0.475 becomes 0.311475, and 0.95 becomes 0.904762."""
    found = head_calls(2, 2.0)
    assert found.times == pytest.approx((0.0, 0.311475410, 0.95))
    dt = 0.904761905 - 0.311475410
    share = 1.311475410 / 0.688524590
    assert (found.steps[1].x_coefficient, found.steps[1].data_coefficient) == pytest.approx(
        (1 - dt * (share + 1), dt * share)
    )


def test_the_order_of_the_tokens_by_hand():
    expected = [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    assert block_order(4, 4, 2).tolist() == expected
    assert block_order(2, 3, 1).tolist() == [0, 1, 2, 3, 4, 5]


# ------------------------------------------------------------------------------------------------ what changes nothing


@pytest.mark.parametrize("count", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_images_are_equal_alone_and_in_a_batch(model, count):
    """Both branches, linear guidance: the null branch has its own noise for the first block."""
    settings = replace(FEW, diffusion_steps=3, cfg_schedule="linear")
    images = range(count)
    labels = [i % 5 for i in images]
    together = draw(model, settings, images, labels).latents
    assert len({tuple(one.flatten().tolist()) for one in together}) == count
    for i in images:
        assert torch.equal(draw(model, settings, (i,), labels[i : i + 1]).latents[0], together[i]), i


def test_modulations_in_advance_equal_those_of_every_step(model, monkeypatch):
    expected = draw(model).latents
    made = []
    head = type(model.net.denoiser)
    plain = head.modulations

    def counted(self, embedding):
        made.append(len(embedding))
        return plain(self, embedding)

    monkeypatch.setattr(head, "modulations", counted)
    assert torch.equal(draw(model).latents, expected)
    assert made == [5] * 4, "all five evaluations of a block in one product"

    made.clear()
    rows = 2 * 4 * model.net.denoiser.modulation_numbers  # both branches of a block
    monkeypatch.setattr(module, "MODULATION_BUDGET", 2 * rows)
    assert torch.equal(draw(model).latents, expected)
    assert made == [2, 2, 1] * 4


def test_the_steps_of_the_last_block_at_the_number_of_the_first_are_off(model):
    expected = draw(model)
    for end in (4, 9):
        found = draw(model, replace(FEW, diffusion_steps_end=end))
        assert torch.equal(found.latents, expected.latents) and found.report.counts == expected.report.counts
    assert draw(model, replace(FEW, diffusion_steps_end=1)).report.counts["head_calls"] == 5 + 4 + 3 + 2


def test_fewer_steps_take_entry_k_t_over_s_of_the_noise(model):
    """Of four steps a block of two takes the entries 0 and 2: with others zero nothing changes."""

    class Noise(PairedNoise):
        def step_noise(self, stream, count, tokens, channels):
            noise = super().step_noise(stream, count, tokens, channels)
            noise[:, 1] = noise[:, 3] = 0
            return noise

    settings = replace(FEW, diffusion_steps_end=2)
    condition = from_ids((1,))
    plain = finish(bitdance(model, condition, settings, PairedNoise(5, (0,)))).latents
    spoilt = finish(bitdance(model, condition, settings, Noise(5, (0,)))).latents
    assert not torch.equal(plain, spoilt), "the first block takes all four"

    again = torch.zeros(1, 4, 4)
    again[:, 2:] = 1  # the last two blocks
    edit = Edit(plain, again)
    plain = finish(bitdance(model, condition, settings, PairedNoise(5, (0,)), edit)).latents
    assert torch.equal(finish(bitdance(model, condition, settings, Noise(5, (0,)), edit)).latents, plain)


def test_without_guidance_the_null_rows_are_not_computed(model, monkeypatch):
    sizes = []
    plain = type(model.net.denoiser).denoise

    def counted(self, x, modulations):
        out = plain(self, x, modulations)
        sizes.append(out.shape[:2].numel())
        return out

    monkeypatch.setattr(type(model.net.denoiser), "denoise", counted)
    draw(model, replace(FEW, cfg=1.0), (0, 1), (1, 2))
    assert set(sizes) == {2}
    sizes.clear()
    draw(model, FEW, (0, 1), (1, 2))
    assert set(sizes) == {4}


@pytest.mark.parametrize("what", ["start_noise", "step_noise"])
def test_the_null_branch_has_a_first_block_of_its_own_where_guidance_begins_with_1(model, what):
    """Its noise, of the start and of the steps, decides what later blocks are guided away from, and nothing else."""

    class Noise(PairedNoise):
        pass

    def changed(self, stream, *shape):
        numbers = getattr(PairedNoise, what)(self, stream, *shape)
        return -numbers if stream == "null" else numbers

    setattr(Noise, what, changed)
    first = torch.zeros(4, 4, dtype=torch.bool)
    first[:2, :2] = True
    for schedule, same in (("linear", False), ("constant", True)):
        settings = replace(FEW, cfg=4.0, cfg_schedule=schedule)
        condition = from_ids((1, 2))
        plain, other = (
            finish(bitdance(model, condition, settings, noise(5, (0, 1)))).latents for noise in (PairedNoise, Noise)
        )
        assert torch.equal(other[..., first], plain[..., first]) and torch.equal(other, plain) == same


def test_several_images_of_one_prompt_differ():
    model = text_bitdance()
    settings = replace(FEW, width=8, height=8)
    first, second = draw(model, settings, (0, 1), ("a boat", "a boat")).latents
    assert not torch.equal(first, second)


# ------------------------------------------------------------------------------------------------ edits


@pytest.mark.parametrize("settings", [FEW, SPECULATIVE], ids=["plain", "speculation"])
@pytest.mark.fast_cases("plain")
def test_an_edit_of_everything_is_a_new_image(model, settings):
    start = bits(2, model, (4, 4))
    edit = Edit(start, torch.ones(1, 8, 8))
    found = draw(model, settings, (0, 1), (1, 2), edit=edit)
    plain = draw(model, settings, (0, 1), (1, 2))
    assert torch.equal(found.latents, plain.latents) and found.report.counts == plain.report.counts


@pytest.mark.parametrize("schedule", ["constant", "linear"])
@pytest.mark.parametrize("name", ["class", "prompt"])
@pytest.mark.parametrize("speculation", [0, 3])
def test_tokens_outside_the_mask_are_kept(model, name, schedule, speculation):
    """Blocks without a masked token are read, together if they follow one another; the others are drawn."""
    model = model if name == "class" else text_bitdance()
    settings = replace(FEW, cfg_schedule=schedule, speculation=speculation)
    side = 2 if name == "class" else 4
    if name == "prompt":
        settings = replace(settings, width=24, height=16)
    height, width = model.grid(settings.height, settings.width)
    mask = torch.zeros(1, height, width)
    mask[:, -1, -side:] = 1  # the last row of the last block
    start = bits(1, model, (height, width))
    what = (1,) if name == "class" else ("two birds",)
    found = draw(model, settings, labels=what, edit=Edit(start, mask))

    kept = (mask == 0).expand_as(found.latents)
    assert torch.equal(found.latents[kept], start[kept]) and not torch.equal(found.latents, start)
    counts = found.report.counts
    assert counts["transformer_passes"] == 3  # prompt, first rows, and all blocks before the last one
    assert counts["head_calls"] == 5 if speculation == 0 else counts["head_calls"] <= 5
    outcome = found.report.maps["outcome"][0]
    assert (outcome == 6).sum() == height * width - side and found.report.maps["step"][
        0
    ].max() == height * width // side**2 - 1


@pytest.mark.parametrize("settings", [FEW, SPECULATIVE], ids=["plain", "speculation"])
@pytest.mark.fast_cases("plain")
def test_an_edit_of_the_last_block_equals_the_image_that_it_started_from(model, settings):
    """The blocks before the edit are those of the plain run, so the same noise draws the same last block."""
    plain = draw(model, settings).latents
    mask = torch.zeros(1, 4, 4)
    mask[:, 2:, 2:] = 1
    start = plain.clone()
    start[..., 2:, 2:] *= -1
    assert torch.equal(draw(model, settings, edit=Edit(start, mask)).latents, plain)

    # Rounded or scaled latents have the same signs.
    assert torch.equal(draw(model, settings, edit=Edit(0.3 * start, mask)).latents, plain)


@pytest.mark.parametrize("settings", [FEW, replace(FEW, speculation=5)], ids=["plain", "speculation"])
def test_known_tokens_of_a_block_follow_their_own_path(model, settings):
    """At time t they are (1 - t) noise + t token, whatever the head predicts for them."""
    mask = torch.ones(1, 4, 4)
    mask[0, 0, 0] = 0
    start = bits(1, model, (4, 4))
    seen = []
    head = model.net.denoiser
    hook = head.input_proj.register_forward_pre_hook(lambda layer, args: seen.append(args[0].clone()))
    draw(model, settings, edit=Edit(start, mask))
    hook.remove()

    # The first window has all five states; both branches share them.
    states = seen[0] if settings.speculation else torch.cat(seen[:5])
    noise = PairedNoise(5, (0,)).start_noise("full", 16, 6)[0, 0]
    assert len(states) == 5
    for k, x in enumerate(states):
        t = 0.95 * k / 4
        torch.testing.assert_close(x[0], (1 - t) * noise + t * start[0, :, 0, 0])


@pytest.mark.parametrize("settings", [FEW, SPECULATIVE], ids=["plain", "speculation"])
@pytest.mark.fast_cases("plain")
def test_an_edited_image_does_not_depend_on_its_batch(model, settings):
    """The masks of a batch may differ: a block that is drawn for one image is drawn for all.

    The third block is drawn whole for one image and in part for the other.
    """
    start = bits(2, model, (4, 4))
    masks = torch.zeros(2, 4, 4)
    masks[0, 0, 0] = 1
    masks[0, 2:, :2] = 1
    masks[1, 3] = 1
    edit = Edit(start, masks)
    together = draw(model, settings, (0, 1), (1, 2), edit=edit)
    for i in (0, 1):
        alone = draw(model, settings, (i,), (i + 1,), edit=edit.for_images([i], 2))
        assert torch.equal(alone.latents[0], together.latents[i])
        assert alone.report.edits == together.report.edits[i : i + 1]
        for name, values in alone.report.maps.items():
            assert (values[0] == together.report.maps[name][i]).all(), name


def test_latents_of_another_size_are_refused_and_the_remedy_works(model):
    with pytest.raises(UserError, match="^latent_image: .* 4 x 4 pixels, .* 8 x 8; encode an image of"):
        draw(model, edit=Edit(bits(1, model, (2, 2)), torch.ones(1, 4, 4)))
    with pytest.raises(UserError, match=r"^latent_image: its shape is \[1, 5, 4, 4\], but tiny has latents of 6"):
        draw(model, edit=Edit(bits(1, model, (4, 4))[:, 1:], torch.ones(1, 4, 4)))
    draw(model, edit=Edit(bits(1, model, (4, 4)), torch.ones(1, 4, 4)))
    with pytest.raises(UserError, match="^mask: it is empty"):
        draw(model, edit=Edit(bits(1, model, (4, 4)), torch.zeros(1, 4, 4)))


# ------------------------------------------------------------------------------------------------ sizes, refusals


def test_the_noise_belongs_to_the_cells():
    """Models of other blocks draw from the same noise."""
    seen = {}
    for block in (1, 4, 16):
        model = tiny_bitdance(block=block)
        canvas, _ = canvases.block_canvas(model, from_ids((1,)), FEW, PairedNoise(5, (0,)), None)
        start, steps = noise_in_order(canvas)
        back = canvas.order.argsort()
        seen[block] = (start[:, back], steps[:, :, back])
    for block in (4, 16):
        assert all(torch.equal(a, b) for a, b in zip(seen[1], seen[block], strict=True))


def test_a_prompt_may_have_any_size_of_whole_blocks():
    model = text_bitdance()
    assert draw(model, replace(FEW, width=8, height=24), labels=("a boat",)).latents.shape == (1, 12, 12, 4)
    with pytest.raises(UserError, match="^width: 12 x 24 cannot be divided into blocks of 8 x 8 pixels"):
        draw(model, replace(FEW, width=12, height=24), labels=("a boat",))
    with pytest.raises(UserError, match=r"^width: 40 x 8 needs the token <\|res_20\|>, .* tokenizer of"):
        draw(model, replace(FEW, width=40, height=8), labels=("a boat",))


def test_an_imagenet_model_has_one_size(model):
    with pytest.raises(UserError, match="^width: .* 16 x 8; choose one of 8 x 8"):
        draw(model, replace(FEW, width=16, height=8))
    draw(model, replace(FEW, width=8, height=8))


def official(block: int) -> BlockModel:
    """The recorded text model with the stride and the blocks of a published one."""
    model = text_bitdance()
    marks = replace(model.marks, sizes={side: 0 for side in range(1, 257)}, queries=tuple(range(1, block)))
    net = type(model.net).__new__(type(model.net))
    net.__dict__ = dict(model.net.__dict__)
    net.block = block
    return replace(model, net=net, stride=16, marks=marks)


def test_published_sizes():
    """64 tokens a block: the sizes of the 1024 area in both orders; 16 tokens also those of the 512 area."""
    large = official(64)
    assert large.usual_size == (1024, 1024) and len(large.sizes) == 11
    assert large.grid(None, None) == (64, 64) and large.grid(512, 2048) == (32, 128)
    assert large.grid(2048, 512) == (128, 32) and large.grid(1152, 896) == (72, 56)
    with pytest.raises(UserError, match="^width: .* 1000 x 1000; choose one of 1024 x 1024, .*896 x 1152"):
        large.grid(1000, 1000)
    with pytest.raises(UserError, match="^width: .* 512 x 512"):
        large.grid(512, 512)

    small = official(16)
    assert small.grid(512, 512) == (32, 32) and small.grid(384, 640) == (24, 40) and len(small.sizes) == 18


def test_a_large_model_is_refused_on_a_cpu(model, monkeypatch):
    """14B: a head of 1.76 billion weights, 4096 tokens, two branches and 51 evaluations are 1.5 PFLOP."""
    weights = sum(p.numel() for p in model.net.denoiser.parameters())
    monkeypatch.setattr(checks, "LARGE_HEAD", weights)
    with pytest.raises(UserError, match="^model: .* diffusion head of tiny .* PFLOP"):
        draw(model)
    monkeypatch.setattr(checks, "LARGE_HEAD", weights + 1)
    draw(model)
    assert round(2 * 1_758_464_032 * 4096 * 2 * 51 / 1e15, 1) == 1.5


def test_too_much_noise_is_refused(model, monkeypatch):
    """4 bytes for 2 images, 4 steps and two draws more, 16 tokens of 6 bits."""
    monkeypatch.setattr(batches, "NOISE_LIMIT", 4 * 2 * (4 + 2) * 16 * 6 - 1)
    batches.expect_little_noise(model, FEW, 1, "condition")
    with pytest.raises(UserError, match="^condition: the noise of 2 images with 4 diffusion steps needs more than"):
        batches.expect_little_noise(model, FEW, 2, "condition")


def test_a_long_prompt_is_refused():
    model = text_bitdance()
    with pytest.raises(UserError, match="^text: .* tokens .* reads at most 1024"):
        draw(model, replace(FEW, width=8, height=8), labels=("a red house " * 600,))
    short = replace(model.net.config, positions=40)
    net = type(model.net).__new__(type(model.net))
    net.__dict__ = {**model.net.__dict__, "config": short}
    with pytest.raises(UserError, match="^width: 16 image tokens .* 40 positions of"):
        draw(replace(model, net=net), replace(FEW, width=8, height=8), labels=("two birds",))


def test_a_negative_prompt_is_refused():
    model = text_bitdance()
    condition = PromptCondition(("a boat",), "no fog")
    with pytest.raises(UserError, match="^condition: its prompts have a negative .* always uses its own null prompt"):
        finish(bitdance(model, condition, replace(FEW, width=8, height=8), PairedNoise(5, (0,))))


def test_cancelling_in_the_middle_of_a_block_leaves_nothing_behind(model):
    steps = bitdance(model, from_ids((1,)), FEW, PairedNoise(5, (0,)))
    for _ in range(7):
        next(steps)
    steps.close()
    seen, result = stepped(bitdance(model, from_ids((1,)), FEW, PairedNoise(5, (0,))))
    assert len(seen) == 20 and torch.equal(result.latents, draw(model).latents)
