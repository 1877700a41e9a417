"""The command that counts equal images."""

import pytest
from fastar_nodes.lab.experiments import equal
from fastar_nodes.model_loaders.catalogue import official

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_windows_are_counted_against_parallel_1(lab, tiny_demo, monkeypatch, dtype):
    """Windows of both dtypes draw the image of parallel 1."""
    monkeypatch.setattr(equal, "COMPARED", (2,))
    monkeypatch.setattr(equal, "_BATCH", 2)
    done = lab(f"equal --samplers llamagen --device cpu --dtype {dtype} --images 3")
    assert done.code == 0, done
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.out.splitlines()]
    assert rows[0][3:] == ["equal to parallel 1", "of", "equal tokens %"]
    assert [row[2:] for row in rows[2:]] == [["parallel 2", "3", "3", "100.0"]]


def test_the_codes_of_tars_language_model_are_counted_too(lab, tiny_demo):
    done = lab("equal --model demo-dtok --samplers tar --device cpu --images 2")
    assert done.code == 0, done
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.out.splitlines()[2:]]
    assert [row[0] for row in rows] == [rows[0][0]] * 2 + ["Tar's language model"] * 2
    assert [row[2:] for row in rows] == [["parallel 0", "2", "2", "100.0"], ["parallel 8", "2", "2", "100.0"]] * 2


def test_what_cannot_be_compared_is_refused(lab, tiny_demo):
    masked = lab("equal --samplers mar --device cpu")
    assert masked.code == 2 and "samplers: mar has no setting parallel" in masked.err


@pytest.mark.parametrize(
    ("images", "samplers"),
    [
        (2, {"llamagen": "LlamaGen"}),
        pytest.param(3, {"llamagen": "LlamaGen", "zipar": "ZipAR"}, marks=pytest.mark.slow),
    ],
)
def test_a_janus_of_official_size_has_random_weights(lab, monkeypatch, images, samplers):
    """Of a small width here."""
    monkeypatch.setitem(official.JANUS_SIZES, "Janus-Pro-1B", (16, 3, 2, 24))
    monkeypatch.setattr(equal, "COMPARED", (2,))
    line = f"equal --random Janus-Pro-1B --samplers {','.join(samplers)} --images {images}"
    done = lab(f"{line} --device cpu --dtype bf16")
    assert done.code == 0, done
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.out.splitlines()[2:]]
    assert [row[0] for row in rows] == [*samplers.values()]
    assert [row[2:] for row in rows] == [["parallel 2", str(images), str(images), "100.0"]] * len(samplers)
