"""Images to bytes and back, scaled images, and previews, with numbers by hand."""

import numpy as np
import pytest
import torch
from fake_comfy import Progress
from fastar_nodes.nodes import preview
from fastar_nodes.nodes.host.images import to_image
from fastar_nodes.runs.images import scaled, to_rgb
from test_host import steps
from tiny import a_vae


def test_grey_is_repeated_and_alpha_dropped():
    pixel = torch.tensor([10.0, 20.0, 30.0, 200.0]).view(1, 1, 1, 4)
    assert to_rgb(pixel).flatten().tolist() == [10, 20, 30]
    assert to_rgb(pixel[..., :3]).flatten().tolist() == [10, 20, 30]
    assert to_rgb(pixel[..., 3:]).flatten().tolist() == [200, 200, 200]


def test_an_image_of_bytes_is_in_0_to_1():
    made = to_image(np.array([[[[0, 51, 255]]]], dtype=np.uint8))
    assert torch.allclose(made, torch.tensor([0.0, 0.2, 1.0])) and made.dtype == torch.float32


def test_scaling_stays_in_range_and_averages():
    edge = torch.zeros(1, 3, 8, 8)
    edge[..., 4:] = 1
    larger = scaled(edge, (32, 32))
    assert larger.min() == 0 and larger.max() == 1, "bicubic overshoots"
    columns = torch.tensor([1.0, 0, 0, 1] * 2).expand(1, 3, 8, 8)
    averages = scaled(columns, (8, 2))
    assert averages.shape[2:] == (8, 2) and torch.allclose(averages, torch.tensor(0.5), atol=0.15)
    assert scaled(edge, (8, 8)) is edge


def test_undecided_tokens_of_a_wide_grid_are_grey():
    """One row of two tokens; the image is 4 high and 8 wide, enlarged to 128 x 256."""
    canvas = preview.Canvas(lambda z: torch.ones(1, 4, 8, 3))
    sheet = canvas.draw(torch.zeros(1, 1, 1, 2), torch.tensor([[[True, False]]]))
    assert sheet.shape == (128, 256, 3)
    assert (sheet[:, :128] == 255).all() and (sheet[:, 128:] == 128).all()


def test_a_small_preview_is_enlarged_smoothly():
    """A black and a white half, 2 pixels wide, become 256 pixels with shades between."""
    half = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1).expand(1, 2, 2, 3)
    sheet = preview.Canvas(lambda z: half).draw(torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1, dtype=torch.bool))
    assert sheet.shape == (256, 256, 3)
    assert sheet[128, 0, 0] < 10 and sheet[128, 255, 0] > 245
    assert len(np.unique(sheet[128, :, 0])) > 50


def test_the_first_preview_comes_after_half_a_second(monkeypatch):
    now = [7.0]
    monkeypatch.setattr(preview.time, "perf_counter", lambda: now[0])
    canvas = preview.Canvas(lambda z: torch.zeros(1, 4, 4, 3))
    due = []
    for now[0] in (7.0, 7.4, 7.6):
        due.append(canvas.due())
    assert due == [False, False, True]
    canvas.draw(torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1, dtype=torch.bool))
    due = []
    for now[0] in (8.0, 8.2):
        due.append(canvas.due())
    assert due == [False, True]


def test_the_last_step_is_always_shown(monkeypatch):
    monkeypatch.setattr(preview.Canvas, "due", lambda self: False)
    preview.drive(steps(3, []), a_vae())
    assert [shown is not None for _, _, shown in Progress.updates] == [False, False, True]


def test_a_sampler_is_closed_when_its_preview_fails(monkeypatch):
    closed = []
    vae = a_vae()
    monkeypatch.setattr(vae, "decode_now", lambda z: 1 / 0)
    sampler = steps(1, closed)
    with pytest.raises(ZeroDivisionError):
        preview.drive(sampler, vae)
    assert closed == [True]
