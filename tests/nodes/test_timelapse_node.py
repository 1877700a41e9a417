"""What the samplers report, as maps, text and time-lapses."""

import json
import sys
from pathlib import Path

import pytest
import torch
from fake_comfy import state
from fastar_nodes.errors import UserError
from fastar_nodes.nodes import compare, samplers, timelapse
from fastar_nodes.reports.timelapse import FPS
from tiny import NODES, a_report, models, sample


def made(**inputs):
    about = {"filename_prefix": "a/b", "duration": 1.0} | inputs
    return timelapse.TimeLapse.execute(**about).result[0]


# Maps that every report has, and those that a sampler adds.
MAPS = ("fixed at step", "order", "outcome", "tokens per step")
OWN_MAPS = {samplers.LazyMARSampler: "cached", samplers.CSpDSampler: "rejected", samplers.MuLoSDSampler: "islands"}


@pytest.mark.parametrize("node", NODES.values())
@pytest.mark.fast_cases("LlamaGenSampler")
def test_every_sampler_can_be_shown(node):
    """As maps, as text, and as a time-lapse: the first frame has
    most tokens in grey, and the file holds the frames of the output.
    """
    samples, report = sample(node)
    image = next(iter(models(node).values())).vae.decode(samples)
    for what in (*MAPS, *([OWN_MAPS[node]] if node in OWN_MAPS else [])):
        shown = compare.TokenMap.execute(report=report, image=image, what=what, opacity=0.5).result[0]
        assert shown.shape[0] == 2 and shown.std() > 0.01
    (record,) = json.loads(compare.ReportToText.execute(report=report, format="json").result[0])["runs"]
    assert record["settings"] == report.settings
    frames = made(image_1=image, report_1=report)
    grey = [float(((frame * 255).round() == 128).all(-1).float().mean()) for frame in (frames[0], frames[-1])]
    assert len(frames) == FPS + 1 + 2 * FPS and grey[0] > grey[1] + 0.2
    saved, prefix, about = state.saved[-1]
    assert saved is frames and prefix == "a/b" and about["fps"] == FPS


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        ("x" * 300, "give a shorter name"),
        ("a" * 300 + "/b", "give a shorter name"),
        ("a\0b", "characters that no file name can have"),
        ("../x", "is not inside the output folder"),
        ("/tmp/x", "is not inside the output folder"),
        ("", "is not inside the output folder"),
        ("file/x", "cannot be written"),
        ("x/" * 3000, "give a shorter name"),
        ("x" * 10_000, "give a shorter name"),
        ("\ud800", "characters that no file name can have"),
    ],
)
@pytest.mark.fast_cases(4)
def test_a_prefix_that_no_file_can_have_is_refused_before_the_frames_are_drawn(tmp_path, monkeypatch, prefix, words):
    monkeypatch.setattr(state, "folder", tmp_path)
    monkeypatch.setattr(timelapse, "time_lapse", lambda *_: pytest.fail("no frame should be drawn"))
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "file").touch()
    samples, report = sample(samplers.MARSampler)
    image = models(samplers.MARSampler)["model"].vae.decode(samples)
    with pytest.raises(UserError, match=f"^filename_prefix: .*{words}") as caught:
        made(image_1=image, report_1=report, filename_prefix=prefix)
    assert str(caught.value).isprintable() and len(str(caught.value)) <= 400
    assert [p.name for p in (tmp_path / "output").iterdir()] == ["file"]


@pytest.mark.parametrize("prefix", ["x_%date:yyyy-MM-dd%", "a|b", "%year%/x?"])
def test_a_name_that_gives_an_empty_file_on_windows_is_refused_there(tmp_path, monkeypatch, prefix):
    """A colon opens a stream of an empty file. Elsewhere the name is what core's Save Image makes of it."""
    monkeypatch.setattr(state, "folder", tmp_path)
    samples, report = sample(samplers.MARSampler)
    image = models(samplers.MARSampler)["model"].vae.decode(samples)
    run = {"image_1": image, "report_1": report, "filename_prefix": prefix}
    made(**run)
    assert state.saved[-1][1] == prefix

    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(UserError, match="^filename_prefix: .*Windows .*; leave these characters out. .* write %year%"):
        made(**run)


def test_what_is_missing_or_out_of_range_is_named():
    samples, report = sample(samplers.MARSampler)
    image = models(samplers.MARSampler)["model"].vae.decode(samples)
    for field, inputs in {
        "image_1": {},
        "report": {"image_1": image},
        "report_1": {"image_1": image, "report_1": 3},
        "report_2": {"image_1": image, "report_1": report, "report_2": report},
        "image": {"image_1": image[:1], "report_1": report},
        "duration": {"image_1": image, "report_1": report, "duration": 11.0},
        "filename_prefix": {"image_1": image, "report_1": report, "filename_prefix": 3},
    }.items():
        with pytest.raises(UserError, match=f"^{field}: "):
            made(**inputs)
    with pytest.raises(UserError, match="^report: .*'MAR'"):
        made(image_1=torch.zeros(1, 8, 8, 3), report_1=a_report("mar"))


def test_a_folder_that_cannot_be_written_to_is_named_before_and_after(tmp_path, monkeypatch):
    monkeypatch.setattr(state, "folder", tmp_path)
    samples, report = sample(samplers.MARSampler)
    run = {"image_1": models(samplers.MARSampler)["model"].vae.decode(samples), "report_1": report}
    made(**run, filename_prefix="new/folder/time_lapse")  # the remedy of the message

    def read_only(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", read_only)
        with pytest.raises(
            UserError, match="^filename_prefix: .*cannot be written .Read-only file system.; choose a file"
        ):
            made(**run)

    def full(*a, **k):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(timelapse.ui.ImageSaveHelper, "get_save_animated_webp_ui", full)
    with pytest.raises(UserError, match="^filename_prefix: the animation cannot be saved as 'a/b' .*No space left"):
        made(**run)
