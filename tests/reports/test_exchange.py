"""Reports in the metadata of images: what is written comes
back, and files that others wrote are refused in one sentence.
"""

import json
import os

import numpy as np
import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.reports import exchange
from fastar_nodes.reports.quality import Quality
from fastar_nodes.reports.record import Report
from fastar_nodes.reports.summary import one_line
from fastar_nodes.runs.baseline import no_gain
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo


def report(sampler="fasthybrid", seconds=1.5, **counts) -> Report:
    settings = {"threshold": 0.9, "order": "random", "enabled": True, "steps": 8}
    out = Report(sampler, "tiny", settings, 7, 2, "cpu", seconds)
    out.phases = {"head": 0.5}
    out.add(**counts)
    return out


def write(path, text):
    about = PngInfo()
    about.add_text(exchange.KEY, text)
    Image.fromarray(np.full((6, 4, 3), 90, np.uint8)).save(path, pnginfo=about)
    return path


def test_what_is_written_comes_back(tmp_path):
    fast, plain = report(accepted=3, rejected=1, transformer_passes=8), report("mar", 3.0, transformer_passes=8)
    metadata = {"workflow": {}}
    exchange.add_runs(metadata, exchange.described([plain], "4"))
    exchange.add_runs(metadata, exchange.described([fast], "5"))
    # A comparison describes both again: the same runs, now with labels and speed-up.
    quality = [None, Quality(30.0, 0.9)]
    exchange.add_runs(metadata, exchange.described([plain, fast], "7", ["MAR", "ours"], 0, quality))
    runs = metadata[exchange.KEY]["runs"]
    assert [run["node"] for run in runs] == ["7", "7"]
    assert runs[1]["speedup"] == 2.0 and runs[1]["quality"]["psnr"] == 30.0
    saved = exchange.read_runs(write(tmp_path / "a.png", json.dumps(metadata[exchange.KEY])))
    assert saved.image.size == (4, 6) and saved.labels == ["MAR", "ours"]
    assert saved.qualities == quality and saved.baselines == [0, 0]
    assert saved.reports == [plain, fast] and saved.reports[1].acceptance == 0.75


def test_an_image_without_metadata_names_the_option_that_leaves_it_out(tmp_path):
    Image.fromarray(np.full((6, 4, 3), 90, np.uint8)).save(tmp_path / "bare.png")
    with pytest.raises(
        UserError, match=r"^image: bare\.png holds no FastAR report\..* sampler .* with --disable-metadata"
    ):
        exchange.read_runs(tmp_path / "bare.png")


def test_how_a_run_was_timed_and_what_it_drew_comes_back(tmp_path):
    run = report()
    run.timings, run.threads, run.dtype, run.process = (1.0, 1.5, 4.0), 2, "bf16", "one"
    run.conditions, run.edits, run.first_run = ("ab", "cd"), ("ef", "ef"), True
    run.grid = (8, 12)
    text = json.dumps({"version": 1, "runs": exchange.described([run])})
    (found,) = exchange.read_runs(write(tmp_path / "a.png", text)).reports
    assert found == run and found.process == "one"


def write_as(path, text, animated=False):
    """As core's save nodes write the formats: EXIF of "key:value" under several tags, chunks of animated PNG files."""
    frames = [Image.fromarray(np.full((6, 4, 3), level, np.uint8)) for level in (90, 200, 30)]
    more = {"save_all": True, "append_images": frames[1:]} if animated else {}
    if path.suffix == ".png":
        about = PngInfo()
        for key, value in (("prompt", "{}"), (exchange.KEY, text)):
            about.add(b"comf", f"{key}\0{value}".encode("latin-1"), after_idat=True)
        frames[0].save(path, pnginfo=about, **more)
    else:
        about = frames[0].getexif()
        about[0x0110], about[0x010F], about[0x010E] = "prompt:{}", "workflow:{}", f"{exchange.KEY}:{text}"
        frames[0].save(path, exif=about, quality=100, **more)
    return path


@pytest.mark.parametrize(
    ("name", "animated"),
    [("a.webp", False), ("a.webp", True), ("a.jpg", False), ("a.jpeg", False), ("a.png", True), ("a.png", False)],
)
def test_every_format_in_which_core_writes_metadata_is_read(tmp_path, name, animated):
    saved = exchange.read_runs(write_as(tmp_path / name, json.dumps(GOOD), animated))
    assert saved.reports == [report(accepted=3, rejected=1)] and saved.image.size == (4, 6)
    assert abs(int(np.asarray(saved.image)[0, 0, 0]) - 90) <= 2, "the first frame"


@pytest.mark.parametrize("name", ["a.webp", "a.jpg"])
def test_metadata_without_a_report_and_damaged_files_are_refused_in_every_format(tmp_path, name, monkeypatch):
    good = write_as(tmp_path / name, json.dumps(GOOD)).read_bytes()
    Image.new("RGB", (4, 4)).save(tmp_path / f"bare_{name}")
    write_as(tmp_path / f"damaged_{name}", "{")
    (tmp_path / f"cut_{name}").write_bytes(good[:100])
    (tmp_path / f"no_exif_{name}").write_bytes(good.replace(b"II*\0", b"XX*\0").replace(b"MM\0*", b"XX\0*"))
    for case, words in {"bare": "holds no", "damaged": "is damaged", "cut": "FastAR reads", "no_exif": ""}.items():
        with pytest.raises(UserError, match=f"^image: .*{case}_{name}.*{words}"):
            exchange.read_runs(tmp_path / f"{case}_{name}")

    monkeypatch.setattr(exchange, "_MOST_BYTES", 50)
    with pytest.raises(UserError, match="larger than"):
        exchange.read_runs(tmp_path / name)


def test_a_run_names_its_baseline(tmp_path):
    """Two families with a baseline each; a baseline that is not in the file is none."""
    runs = [report("zipar", 1.0), report("mar", 3.0), report("llamagen", 4.0), report("fasthybrid", 2.0)]
    entries = exchange.described(runs, "7", (), [2, 1, 2, 1])
    saved = exchange.read_runs(write(tmp_path / "a.png", json.dumps({"version": 1, "runs": entries})))
    assert saved.baselines == [2, 1, 2, 1]
    saved = exchange.read_runs(write(tmp_path / "b.png", json.dumps({"version": 1, "runs": entries[:2]})))
    assert saved.baselines == [None, 1]


GOOD = json.loads(json.dumps({"version": 1, "runs": exchange.described([report(accepted=3, rejected=1)])}))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"runs": []}', '{"runs": [3]}', '{"runs": {"a": 1}}', "[" * 100000,
     json.dumps({"runs": GOOD["runs"] * 600})],
)  # fmt: skip
def test_damaged_metadata_is_refused(tmp_path, text):
    with pytest.raises(UserError, match="^image: "):
        exchange.read_runs(write(tmp_path / "a.png", text))


KEYS = st.text(max_size=5)
SIMPLE = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
VALUES = st.recursive(SIMPLE, lambda v: st.lists(v, max_size=3) | st.dictionaries(KEYS, v, max_size=3))


@given(st.sampled_from(sorted(GOOD["runs"][0])), VALUES)
@settings(max_examples=40)
def test_any_value_gives_a_report_or_one_sentence(name, value):
    run = {**GOOD["runs"][0], name: value}
    try:
        found = exchange.from_dict(run)
    except ValueError as field:
        assert str(field) == f"the entry {name} is missing or wrong"
    else:
        assert found.images >= 1 and 0 <= found.seconds < 1 << 64
        one_line(found)
        no_gain(found)
        found.to_dict()


def test_pictures_without_a_report_and_files_that_are_none(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "plain.png")
    Image.new("RGB", (4, 4)).save(tmp_path / "webp.png", "WEBP")
    Image.new("RGB", (4, 4)).save(tmp_path / "gif.png", "GIF")
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "postscript.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n")
    (tmp_path / "folder.png").mkdir()
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.png")
    for name in [path.name for path in tmp_path.iterdir()] + ["gone.png"]:
        with pytest.raises(UserError, match=f"^image: {name}"):
            exchange.read_runs(tmp_path / name)


def test_one_line():
    fast = report(accepted=97, rejected=3, transformer_passes=8)
    assert one_line(fast) == "8 passes, 97 % of drafts accepted, 1.50 s (one run)"
    line = one_line(fast, report("mar", 3.0), Quality(31.04, 0.93))
    work = "8 passes, 97 % of drafts accepted, PSNR 31.0 dB, SSIM 0.930"
    assert line == f"{work}, 1.50 s (one run), about 2.00x (one run each)"
    assert one_line(fast, None, Quality(word="identical")).endswith(", identical, 1.50 s (one run)")


def of(sampler, passes=8, tokens=16, counts=None, **settings) -> Report:
    out = Report(sampler, "tiny", {"steps": 8, **settings}, 7, 1, "cpu", 1.0)
    out.add(transformer_passes=passes, **(counts or {}))
    out.maps["step"] = np.arange(tokens).reshape(1, 4, -1)
    return out


GAINS = [
    of("fasthybrid", counts={"accepted": 1, "rejected": 9}, lookahead=4, threshold=0.9),
    of("mar"),
    of("mar", speculation=0),
    of("lazymar", counts={"cached_calls": 1}),
    of("lazymar", refresh_period=1),  # a saved report without this count
    of("zipar", window=2),
    of("par"),
    of("llamagen", 16),
    of("cspd", counts={"drafted_steps": 4, "accepted_steps": 1}),
]
NO_GAINS = {
    "No draft was accepted": of("fasthybrid", counts={"rejected": 9}, lookahead=4, threshold=0.9),
    "No draft could be accepted": of("fasthybrid", lookahead=0, threshold=0.9),
    "Nothing came from the cache": of("fasthybrid+lazymar", counts={"cached_calls": 0}, lookahead=4, threshold=0.9),
    "Every pass decided only one token": of("zipar", 16),
    "No drafted diffusion step": of("cspd", counts={"drafted_steps": 4, "accepted_steps": 0}),
}


def test_a_run_that_gained_nothing_says_so():
    for run in GAINS:
        assert no_gain(run) == "", run.sampler
    for words, run in NO_GAINS.items():
        sentence = no_gain(run)
        assert sentence.startswith(words) and sentence.endswith(".")
    assert no_gain(of("zipar", window=2), report("llamagen", 0.1)) == "", "single runs may differ by any factor"


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("name", ["label", "device", "note", "settings", "sampler", "phases", "quality"])
@pytest.mark.parametrize("depth", [10, 900])
def test_deep_values_are_no_values(tmp_path, name, depth):
    """They are read as JSON and are too deep to be printed."""
    text = json.dumps({"version": 1, "runs": [{**GOOD["runs"][0], name: nested(depth)}]})
    try:
        saved = exchange.read_runs(write(tmp_path / "a.png", text))
    except UserError as sentence:
        sentence_of = (
            f"image: the report of a.png is damaged (the entry {name} is missing or wrong); choose a file that was not "
            "edited."
        )
        assert str(sentence) == sentence_of
        return
    assert name == "label" and saved.labels == [""]


@pytest.mark.parametrize("version", [2, 0, "1", None, [1]])
def test_a_report_of_another_format_is_not_read(tmp_path, version):
    text = json.dumps({**GOOD, "version": version})
    with pytest.raises(UserError, match="^image: the report of a.png has the format .* reads the format 1"):
        exchange.read_runs(write(tmp_path / "a.png", text))
