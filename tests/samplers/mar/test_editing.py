"""Drawing part of an image anew, in every sampler: what is given comes back bit for bit."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.reports.record import GIVEN
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.editing import Edit
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.mar.mar import mar
from fastar_nodes.samplers.mar.settings import MARSettings
from fastar_nodes.samplers.noise import PairedNoise
from hypothesis import given, settings
from hypothesis import strategies as st
from stepping import stepped
from test_sampler_contract import start
from tiny_models import tiny_mar

CASES = "mar", "mar, annealed", "mar, speculation", "fasthybrid", "cspd", "cspd, paper", "cspd, published"
LEFT = torch.zeros(1, 4, 4)
LEFT[:, :, :2] = 1


@pytest.fixture(params=CASES, ids=str)
def case(request):
    return request.param


def picture(images: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(images, 4, 4, 4, generator=torch.Generator().manual_seed(seed))


def run(case, edit, images=(0, 1), labels=(1, 4)):
    return finish(start(case, images, labels, edit=edit))


def test_given_tokens_come_back_bit_for_bit_and_are_shown_at_every_step(case):
    """Masks may differ between images if they are as large."""
    given, drawn = picture(2), torch.cat([LEFT, LEFT.flip(2)]).bool()
    seen, result = stepped(start(case, (0, 1), (1, 4), edit=Edit(given, drawn.float())))
    kept = ~drawn[:, None].expand_as(given)
    assert torch.equal(result.latents[kept], given[kept])
    assert bool((result.latents[~kept] != given[~kept]).all())
    assert np.array_equal(result.report.maps["outcome"] == GIVEN, ~drawn.numpy())
    assert np.array_equal(result.report.maps["step"] == -1, ~drawn.numpy())
    assert len(seen) == 6
    for step in seen:
        assert torch.equal(step.latents[kept], given[kept]) and bool(step.decided[~drawn].all())
    assert int(seen[0].decided.sum()) < 32 and bool(seen[-1].decided.all())


@pytest.mark.fast_cases("mar", "fasthybrid")
def test_all_of_it_is_a_new_picture_bit_for_bit(case):
    anew, plain = run(case, Edit(picture(), torch.ones(1, 4, 4))), run(case, None)
    assert torch.equal(anew.latents, plain.latents) and anew.report.counts == plain.report.counts


@pytest.mark.parametrize(("largest", "shown"), [(1e38, "1e+38"), (-3e4, "3e+04")])
def test_latents_far_outside_a_decoders_are_refused(largest, shown):
    """They are finite, but the network would compute NaN of them; the sentence blames the latent,
    and its remedy works.
    """
    far = picture()
    far[0, 1, 2, 3] = largest
    with pytest.raises(UserError, match=f"^latent_image: it holds numbers up to {re.escape(shown)}, .*VAE Encode"):
        run("mar", Edit(far, LEFT))
    assert run("mar", Edit(picture(), LEFT)).latents.isfinite().all()


@pytest.mark.fast_cases("mar", "fasthybrid")
def test_an_edit_does_not_depend_on_its_batch(case):
    given = picture(2)
    together = run(case, Edit(given, LEFT))
    for i, label in enumerate((1, 4)):
        alone = run(case, Edit(given[i : i + 1], LEFT), (i,), (label,))
        torch.testing.assert_close(alone.latents, together.latents[i : i + 1], rtol=1e-4, atol=1e-4)


def test_fewer_tokens_than_steps_are_decided_one_at_a_time(case):
    mask = torch.zeros(1, 4, 4)
    mask[0, 1, 2:] = 1
    steps = list(start(case, (0,), (1,), edit=Edit(picture(), mask)))
    assert [(step.done, step.total) for step in steps] == [(1, 2), (2, 2)]


FINE, ALL = torch.zeros(1, 4, 4, 4), torch.ones(1, 4, 4)


@pytest.mark.parametrize(
    ("field", "latents", "mask"),
    [
        ("latent_image", torch.zeros(1, 4, 4, 5), ALL),
        ("latent_image", torch.zeros(1, 8, 4, 4), ALL),
        ("latent_image", torch.zeros(4, 4, 4), ALL),
        ("latent_image", torch.zeros(3, 4, 4, 4), ALL),
        ("latent_image", torch.tensor([torch.nan] + [0.0] * 63).view(1, 4, 4, 4), ALL),
        ("mask", FINE, torch.zeros(1, 4, 4)),
        ("mask", FINE, torch.full((1, 4, 4), 0.001)),
        ("mask", FINE, torch.full((1, 4, 4), -1.0)),
        ("mask", FINE, torch.ones(4, 4)),
        ("mask", FINE, torch.ones(1, 0, 4)),
        ("mask", FINE, torch.ones(3, 4, 4)),
        ("mask", FINE, torch.full((1, 4, 4), torch.inf)),
        ("mask", FINE, torch.stack([torch.ones(4, 4), torch.eye(4)])),
    ],
)
def test_what_does_not_fit_is_refused(field, latents, mask):
    with pytest.raises(UserError, match=f"^{field}: "):
        run("mar", Edit(latents, mask))


def test_a_soft_edge_belongs_to_the_mask():
    """Rows of 255, 153, 1 and 0 of 255: only black stays, as the help says. Half of 1 is not black."""
    for levels, wanted in (
        ([255, 153, 1, 0], [True, True, True, False]),
        ([255, 0.5, 0.49, 0], [True, True, False, False]),
    ):
        mask = (torch.tensor(levels) / 255)[None, :, None].expand(1, 4, 4)
        drawn = Edit(picture(), mask).token_mask(4, 1, torch.device("cpu"))
        assert drawn.view(4, 4).all(1).tolist() == wanted == drawn.view(4, 4).any(1).tolist()


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 10**6))
def test_a_mask_of_any_size_covers_every_token_it_touches(height, width, spot):
    """And every token that is drawn has some of the mask over it."""
    y, x = spot % height, spot // height % width
    mask = torch.zeros(1, height, width)
    mask[0, y, x] = 1 / 255
    drawn = Edit(picture(), mask).token_mask(4, 1, torch.device("cpu"))
    rows, columns = drawn.view(4, 4).nonzero(as_tuple=True)
    # The cells a mask's value lies over, by area.
    over = {
        (i, j)
        for i in range(4)
        for j in range(4)
        if y * 4 < (i + 1) * height and (y + 1) * 4 > i * height and x * 4 < (j + 1) * width and (x + 1) * 4 > j * width
    }
    assert set(zip(rows.tolist(), columns.tolist(), strict=True)) == over


def test_latents_of_half_precision_and_patches_of_two():
    patched = dataclasses.replace(tiny_mar(0, 4, channels=4 * 4), latent_scale=0.3, patch=2)
    given, mask = picture().half(), torch.zeros(1, 64, 64)
    mask[:, :20, :20] = 1
    made = MARSettings(steps=1, diffusion_steps=6, cfg=2.0)
    out = finish(mar(patched, from_ids((1,)), made, PairedNoise(0, (0,)), edit=Edit(given, mask))).latents
    kept = torch.ones(1, 4, 4, 4, dtype=torch.bool)
    kept[:, :, :2, :2] = False
    assert torch.equal(out[kept], given.float()[kept]) and bool((out[~kept] != given.float()[~kept]).all())
