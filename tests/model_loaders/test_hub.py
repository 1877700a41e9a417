"""Catalogue, menus, saved choices, and names that try to lead elsewhere."""

import json
import math
import os
import re
import sys
from pathlib import Path

import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.catalogue import hub
from fastar_nodes.model_loaders.files.shards import weight_files

BASE = "mar-base (download 832 MB, weights without EMA, draws worse)"
EMA = "mar-base-ema (download 1.66 GB)"


def resolve(choice: str, folder: Path, family: str = "mar", progress=None) -> Path:
    return hub.resolve(choice, family, [folder], folder, progress)


@pytest.fixture
def without_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub cannot be imported, and nothing can be connected to."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setattr("socket.socket.connect", None)


def test_catalogue_is_sound() -> None:
    everything = [e for family in hub.KINDS for e in hub.entries(family)]
    raw = json.loads((Path(hub.__file__).with_name("catalogue.json")).read_text())
    assert len(everything) == len(raw["entries"]) == len({e.id for e in everything})
    assert set(raw["about"]) == set(hub.Entry.__dataclass_fields__)
    masked = dict.fromkeys(("mar", "hybrid"), hub.entries("kl"))
    decoders = {**masked, **{family: hub.entries("vq") for family in ("llamagen", "dtok")}}
    extensions = dict.fromkeys(("mar", "kl"), (".safetensors", ".pth", ".ckpt"))
    extensions |= dict.fromkeys(("ta-tok", "dtok", "hybrid"), (".pth",))
    extensions["bitdance-ae"] = (".safetensors",)
    for e in everything:
        wanted = {d.id for d in decoders.get(e.family, ())} or {None}
        # A folder of NextStep-1.1 holds its autoencoder, one of NextStep-1 does not.
        if e.id.startswith("nextstep-1-"):
            wanted = {"nextstep-f8ch16"}
        if e.id == "demo-bitdance":
            wanted = {"demo-binary"}
        assert e.decoder in wanted
        assert not any(os.path.isabs(file) or ".." in file for file in (e.file, *e.parts))
        assert e.built_in or e.parts or e.file.endswith(extensions.get(e.family, ".pt"))
        assert "(" not in e.id
    # Digests are of one commit, where it is known; and of whole files, or of the weights of several.
    for e in everything:
        for part in e.files:
            assert part.sha256 is None or re.fullmatch("[0-9a-f]{64}", part.sha256), e.id
        assert not e.sha256 or e.revision or e.id == "harmon-1.5b-o"
        assert e.revision is None or re.fullmatch("[0-9a-f]{40}", e.revision)
    published = ("mar", "kl", "llamagen", "vq")
    unpinned = [e.id for e in everything if e.family in published and not e.built_in and not e.pinned]
    assert unpinned == ["par-xl-4x", "par-xxl-4x", "par-3b-4x", "par-3b-16x"], "no record was found"
    # The files hold four bytes a number of the official names and shapes,
    # and names and offsets beside them. The first has two copies.
    sizes = [2 * 831_699_072]
    parity = Path(__file__).parents[1] / "parity"
    for path in parity.glob("*/*keys*.json"):
        if path.parent.name in ("bitdance", "nextstep"):
            continue
        shapes = json.loads(path.read_text())
        sizes.append(4 * sum(math.prod(shape) for shape in shapes.get("keys", shapes).values()))
    for e in everything:
        if e.family in published and e.size:
            assert any(0 <= e.size - size <= 300_000 for size in sizes), e.id
    assert {e.size for e in everything if e.id in ("harmon-1.5b", "harmon-1.5b-o")} == {2 * 2_494_774_048}


def test_the_sizes_of_bitdance_are_those_of_the_recorded_shapes() -> None:
    """Two bytes a number of the 14B and of the autoencoder, four of ImageNet's files, in which it lies.

    The published files of B 1x and B 16x in another layout are as large, with names and offsets beside the weights.
    """
    parity = Path(__file__).parents[1] / "parity" / "bitdance"
    large = json.loads((parity / "bitdance_keys_14b.json").read_text())["elements"]
    small = json.loads((parity / "bitdance_keys_imagenet.json").read_text())["elements"]
    size = {e.id: e.size for family in ("bitdance", "bitdance-ae") for e in hub.entries(family)}

    assert size["bitdance-ae"] == 2 * large["ae"]
    assert size["bitdance-14b-64x"] == 2 * sum(large.values())
    fewer = (151_988 - 151_940) * 5120  # rows of the embedding, and of the output layer
    assert size["bitdance-14b-16x"] == 2 * (sum(large.values()) - 2 * fewer)
    for name in ("b-1x", "b-4x", "b-16x", "l-1x", "h-1x"):
        own = small[name.upper().replace("-", "_").replace("X", "x")]
        assert size[f"bitdance-{name}"] == 4 * (own + large["ae"])
    assert 0 < 2_810_727_972 - size["bitdance-b-1x"] < 100_000
    assert 0 < 2_881_685_972 - size["bitdance-b-16x"] < 100_000


MAR_LARGE = "mar-large (download 1.91 GB)"
MAR_HUGE = "mar-huge (download 3.77 GB)"
TAR_7B = "tar-7b (download 17.38 GB)"
LOCAL = ["Tar-1.5B/model.safetensors", "ta_tok.pth", "sub/ar_dtok_lp_512px.pth", "vq_ds16_t2i.pt", "my.pt"]


@pytest.mark.parametrize(
    ("family", "local", "shown"),
    [
        ("mar", [], [BASE, EMA, MAR_LARGE, MAR_HUGE]),
        ("mar", ["z.safetensors", "big\\mar-huge.safetensors", "a/mar-base.safetensors"],
         ["z.safetensors", "big\\mar-huge.safetensors", "a/mar-base.safetensors", EMA, MAR_LARGE]),
        ("kl", [], ["kl16 (download 266 MB)", "kl16-original (download 266 MB)"]),
        ("vq", ["a/vq_ds16_t2i.pt"],
         ["a/vq_ds16_t2i.pt", "vq16-c2i (download 288 MB)", "vq8-c2i (download 281 MB)"]),
        ("tar", [], ["tar-1.5b (download 3.29 GB)", TAR_7B]),
        ("tar", LOCAL, ["Tar-1.5B", "my.pt", TAR_7B]),
        ("ta-tok", LOCAL, ["ta_tok.pth", "my.pt"]),
        ("dtok", LOCAL, ["sub/ar_dtok_lp_512px.pth", "my.pt", "ar-dtok-256 (download)",
                         "ar-dtok-1024 (download)"]),
        ("llamagen", LOCAL[-1:], ["my.pt", "llamagen-b-256 (download 444 MB)"]),
    ],
)  # fmt: skip
def test_menu(family: str, local: list[str], shown: list[str]) -> None:
    menu = [text for text in hub.menu(family, local) if not text.startswith("demo")]
    assert menu[: len(shown)] == shown and (len(menu) == len(shown) or family == "llamagen")
    assert [text for text in hub.menu("mar", [])][:2] == ["demo", "demo-draft"]


def test_a_menu_leaves_out_built_in_files_that_are_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_PACKAGE", tmp_path)
    names = ("demo-llamagen", "demo-llamagen-low", "demo-par")
    assert not set(names) & set(hub.menu("llamagen", [])) and "demo-vq" not in hub.menu("vq", [])
    files = {e.id: tmp_path / e.file for e in hub.entries("llamagen") if e.built_in}
    assert tuple(files) == names
    files["demo-par"].parent.mkdir(parents=True)
    files["demo-par"].touch()
    assert [text for text in hub.menu("llamagen", []) if text.startswith("demo")] == ["demo-par"]
    with pytest.raises(UserError, match="^checkpoint: the built-in file demo-llamagen is missing"):
        resolve("demo-llamagen", tmp_path, "llamagen")


@pytest.mark.parametrize(("family", "own"), [("mar", 3), ("kl", 2), ("llamagen", 0), ("vq", 1)])
def test_a_menu_leaves_out_what_is_catalogued_for_another(family: str, own: int) -> None:
    local = ["c2i_B_256.pt", "sub/vq_ds16_c2i.pt", "kl16.safetensors", "mar-base.safetensors", "my.pt"]
    assert [name for name in hub.menu(family, local) if name in local] == [local[own], "my.pt"]


@pytest.mark.parametrize(
    ("choice", "family", "remedy"),
    [
        ("kl16", "mar", "^checkpoint: kl16 .*choose it in the input decoder$"),
        ("par-xl-4x", "mar", "^checkpoint: par-xl-4x .*choose a different entry"),
        ("kl16 (download 266 MB)", "vq", "^decoder: kl16 .*choose a different entry"),
        ("flan-t5-xl", "llamagen", "^checkpoint: flan-t5-xl .*choose it in the input encoder of LlamaGen Prompt$"),
        ("tar-7b", "dtok", "^checkpoint: tar-7b is a Tar language model, not a Tar de-tokenizer"),
        ("ta-tok", "dtok", "^checkpoint: ta-tok .*choose it in the input ta_tok of Load Tar De-tokenizer$"),
        ("mar-base (downloaded)x", "mar", "^checkpoint: .*choose a different"),
    ],
)
def test_an_entry_of_another_family_is_refused(tmp_path: Path, choice: str, family: str, remedy: str) -> None:
    with pytest.raises(UserError, match=remedy):
        resolve(choice, tmp_path, family)


@pytest.mark.parametrize("where", ["", "below"])
@pytest.mark.parametrize("choice", ["mar-base", BASE, "mar-base (download 5 GB)", "mar-base (download)"])
def test_a_catalogue_choice_outlives_its_download(tmp_path: Path, without_hub: None, where: str, choice: str) -> None:
    file = tmp_path / where / "mar-base.safetensors"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"x")
    assert resolve(choice, tmp_path) == file
    assert hub.resolve(choice, "mar", [tmp_path / "none"], tmp_path) == file
    assert hub.resolve(choice, "mar", [tmp_path], tmp_path / "none") == file
    assert not (tmp_path / "none").exists()


def test_built_in(tmp_path: Path, without_hub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_PACKAGE", tmp_path)
    with pytest.raises(UserError, match="^decoder: the built-in file demo-kl is missing from this installation"):
        resolve("demo-kl", tmp_path, "kl")
    for choice, family, name in (("demo", "mar", "mar"), ("demo-draft", "mar", "mar-draft"), ("demo-kl", "kl", "kl")):
        file = tmp_path / "demo" / "checkpoints" / f"{name}.safetensors"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x")
        assert resolve(choice, tmp_path / "none", family) == file


def test_local_files(tmp_path: Path, without_hub: None) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("mine.safetensors", "sub/other.pth", "two..dots.safetensors", "ümläut (download).ckpt"):
        (tmp_path / name).write_bytes(b"x")
        assert resolve(name, tmp_path) == tmp_path / name
    assert resolve("sub\\other.pth", tmp_path) == tmp_path / "sub" / "other.pth"
    assert hub.resolve("mine.safetensors", "mar", [tmp_path / "sub", tmp_path], tmp_path).is_file()
    with pytest.raises(UserError, match="^checkpoint: 'gone.safetensors' is not in .*choose a different"):
        resolve("gone.safetensors", tmp_path)
    with pytest.raises(UserError, match="any model folder"):
        hub.resolve("gone.safetensors", "mar", [], tmp_path)


@pytest.mark.parametrize(
    "choice",
    [
        "sub/../../secret.safetensors",
        "..\\secret.safetensors",
        "..",
        "",
        " ",
        "/etc/passwd",
        "C:\\secret.safetensors",
        "C:secret.safetensors",
        "\\\\server\\share\\x",
        "//server/share/x",
        "x\0.safetensors",
        "{outside}/secret.safetensors",
    ],
)
def test_names_stay_inside(tmp_path: Path, without_hub: None, choice: str) -> None:
    (tmp_path / "secret.safetensors").write_bytes(b"x")
    (tmp_path / "models" / "sub").mkdir(parents=True)
    with pytest.raises(UserError, match="^checkpoint: .* is not the name of a file in a model folder") as error:
        resolve(choice.format(outside=tmp_path), tmp_path / "models")
    assert "\n" not in str(error.value) and "\0" not in str(error.value)


def test_a_choice_longer_than_any_path_is_not_looked_for(tmp_path: Path, without_hub: None) -> None:
    for choice in ("d/" * 2049, "x" * 4097):
        sentence = "^checkpoint: .* is too long for a file name .*; choose a catalogue entry"
        with pytest.raises(UserError, match=sentence) as e:
            hub.check(choice, "mar", [tmp_path])
        assert len(str(e.value)) < 200


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path, without_hub: None) -> None:
    """ComfyUI lists a link to a drive that is not connected; choosing the same name again would not help."""
    models, drive = tmp_path / "models", tmp_path / "drive"
    models.mkdir()
    try:
        (models / "linked.safetensors").symlink_to(drive / "own.safetensors")
        (models / "folder").symlink_to(drive)
        (models / "loop").symlink_to("loop")
    except OSError:
        pytest.skip("links need rights on this system")

    links = {"linked.safetensors": "linked.safetensors", "folder\\own.safetensors": "folder", "loop": "loop"}
    for choice, link in links.items():
        said = f"cannot be found, because {re.escape(str(models / link))} is a link to .*; connect the drive"
        with pytest.raises(UserError, match=said):
            hub.check(choice, "mar", [tmp_path / "none", models], [choice])
        with pytest.raises(UserError, match=said):
            weight_files(models.joinpath(*choice.split("\\")), "checkpoint", "a MAR")

    drive.mkdir()
    (drive / "own.safetensors").write_bytes(b"x")
    assert resolve("linked.safetensors", models) == models / "linked.safetensors"


@pytest.mark.parametrize(
    ("choice", "family", "about", "decoder"),
    [
        ("demo", "mar", {}, "demo-kl"),
        (BASE, "mar", {}, "kl16"),
        ("sub\\mar-large.safetensors", "mar", {}, "kl16"),
        ("mar-base-ema", "mar", {}, "kl16-original"),
        ("sub\\mar-base-ema\\checkpoint-last.pth", "mar", {}, "kl16-original"),
        ("own.safetensors", "mar", {"stated": "demo-kl"}, "demo-kl"),
        ("own.safetensors", "mar", {"stated": "../evil"}, "kl16"),
        ("own.safetensors", "mar", {"stated": "mar-base"}, "kl16"),
        ("mine.pt", "hybrid", {}, "kl16"),
        ("par-3b-16x (download)", "llamagen", {}, "vq16-c2i"),
        ("llamagen-t2i-xl-512", "llamagen", {}, "vq16-t2i"),
        ("sub/t2i_XL_stage2_512.pt", "llamagen", {}, "vq16-t2i"),
        ("c2i_B_256.pt", "llamagen", {"text": True}, "vq16-c2i"),
        ("mine.pt", "llamagen", {"text": True}, "vq16-t2i"),
        ("mine.pt", "llamagen", {}, "vq16-c2i"),
        ("mine.pt", "llamagen", {"stated": "vq8-c2i"}, "vq8-c2i"),
        ("mine.pt", "llamagen", {"stated": "kl16"}, "vq16-c2i"),
        ("ar-dtok-256", "dtok", {}, "vq16-t2i"),
        ("mine.pth", "dtok", {}, "vq16-t2i"),
    ],
)
def test_decoder_for(choice: str, family: str, about: dict, decoder: str) -> None:
    assert hub.decoder_for(choice, family, **about) == decoder


def test_drafts_that_belong_to_an_entry() -> None:
    ids = {e.id: e for family in hub.KINDS for e in hub.entries(family)}
    assert (
        hub.draft_for("demo") == "demo-draft"
        and hub.draft_for("llamagen-t2i-xl-512 (download 3.11 GB)") == "llamagen-t2i-xl-256"
    )
    assert {hub.draft_for(name) for name in ("ar-dtok-512", "ar-dtok-1024 (download)")} == {"ar-dtok-256"}
    assert hub.ta_tok_for("demo-ta-tok") == "demo-ta-tok"
    assert hub.ta_tok_for(None) == hub.ta_tok_for("../evil") == hub.ta_tok_for("kl16") == "ta-tok"
    assert hub.draft_for("ar-dtok-256") is None and hub.draft_for("mine.safetensors") is None
    for e in ids.values():
        assert e.draft is None or ids[e.draft].family == e.family and ids[e.draft].decoder == e.decoder, e.id


def test_an_entry_in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """checkpoint-last.pth is what all official MARs are called; only the one in the entry's folder is the entry's."""
    calls = []

    def fetch(remote: hub.Remote, path: Path, *about: object) -> None:
        calls.append((remote.name, path))
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x")

    monkeypatch.setattr(hub, "download", fetch)
    (tmp_path / "mar_huge").mkdir()
    (tmp_path / "mar_huge" / "checkpoint-last.pth").write_bytes(b"another model")
    path = resolve(EMA, tmp_path)
    assert path == tmp_path / "mar-base-ema" / "checkpoint-last.pth" == resolve("mar-base-ema", tmp_path)
    assert calls == [("checkpoint-last.pth", path)]
    local = ["mar_huge/checkpoint-last.pth", "mar-base-ema\\checkpoint-last.pth"]
    menu = hub.menu("mar", local)
    assert EMA not in menu and {*local} <= {*menu} and EMA in hub.menu("mar", local[:1])
    assert local[1] not in hub.menu("kl", local) and local[0] in hub.menu("kl", local)


@pytest.mark.parametrize(
    ("choice", "family", "entry"),
    [
        ("mar-base", "mar", "mar-base"),
        ("mar-base (download 832 MB)", "mar", "mar-base"),  # of another version
        ("mar-base.safetensors", "mar", "mar-base"),  # saved where it had been downloaded
        ("official/mar-base.safetensors", "mar", "mar-base"),
        ("official\\mar-base.safetensors", "mar", "mar-base"),  # on Windows
        ("mar-base-ema\\checkpoint-last.pth", "mar", "mar-base-ema"),
        ("Tar-7B-v0.1", "tar", "tar-7b"),
        ("sub\\Tar-7B-v0.1", "tar", "tar-7b"),
        ("flan-t5-xl/model-00001-of-00002.safetensors", "t5", "flan-t5-xl"),
        ("vq_ds16_t2i.pt", "vq", "vq16-t2i"),
    ],
)
def test_a_graph_from_elsewhere_names_the_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: str, family: str, entry: str
) -> None:
    """The file is not here: the choice stands for the download, which is announced as one."""
    hub.check(choice, family, [tmp_path])
    assert hub.absent(choice, family, [tmp_path]).id == entry
    asked: list[Path] = []

    def fetch(remote: hub.Remote, path: Path, *about: object) -> None:
        asked.append(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")

    monkeypatch.setattr(hub, "download", fetch)
    path = hub.resolve(choice, family, [tmp_path], tmp_path)
    (about,) = [e for e in hub.entries(family) if e.id == entry]
    assert path == tmp_path / about.file and path.exists()
    assert asked == [tmp_path / part.path for part in about.files]
    # After the download all spellings are the file.
    asked.clear()
    for again in (choice, entry, about.label):
        assert hub.absent(again, family, [tmp_path]) is None
        found = hub.resolve(again, family, [tmp_path], tmp_path)
        assert found in (path, tmp_path / choice.replace("\\", "/")) and not asked


def test_a_file_of_that_name_is_taken_as_it_is(tmp_path: Path, without_hub: None) -> None:
    """Also where another of the entry's name is nearer."""
    for place in ("mar-base.safetensors", "mine/mar-base.safetensors"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_bytes(b"x")
    assert resolve("mine\\mar-base.safetensors", tmp_path) == tmp_path / "mine" / "mar-base.safetensors"
    assert resolve("mar-base", tmp_path) == tmp_path / "mar-base.safetensors"


def test_a_name_that_is_nowhere_recommends_its_namesake(tmp_path: Path) -> None:
    local = ["other\\mine.safetensors", "x.pt"]
    with pytest.raises(
        UserError, match=r"^checkpoint: 'sub/mine.safetensors' is not in .*; choose 'other.+mine.safetensors'"
    ):
        hub.check("sub/mine.safetensors", "mar", [tmp_path], local)
    with pytest.raises(UserError, match="^checkpoint: 'gone.pt' is not in .*; put the file there, or choose a"):
        hub.check("gone.pt", "mar", [tmp_path], local)


@pytest.mark.parametrize(
    ("choice", "family", "said"),
    [
        ("jadechoghari/MAR", "kl", "to use this repository, choose kl16 or kl16-original"),
        (
            "https://huggingface.co/Epiphqny/PAR/",
            "llamagen",
            "to use this repository, choose par-xl-4x or par-xxl-4x or par-3b-4x or par-3b-16x",
        ),
        ("wusize/harmon", "hybrid", "to use this repository, choose harmon-1.5b or harmon-1.5b-o"),
        ("deepseek-ai/Janus-Pro-1B", "mar", "to use this repository, choose janus-pro-1b"),
        ("someone/something", "t5", "put the file there, or choose a different file"),
        ("mar-bass", "mar", "did you mean mar-base?"),
        ("janus-pro-1", "mar", "did you mean janus-pro-1b?"),
    ],
)
def test_a_repository_or_a_misspelt_entry_suggests_the_entry(
    tmp_path: Path, choice: str, family: str, said: str
) -> None:
    with pytest.raises(UserError, match=f"^[a-z]+: .* is not in .*; {re.escape(said)}"):
        hub.check(choice, family, [tmp_path])


def test_an_unfinished_download_of_a_folder_is_offered_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shards of four have arrived; chosen by the folder's name or as the entry, the others are fetched."""
    names = [f"Tar-7B-v0.1/model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    assert hub.menu("tar", names[:2])[-2:] == ["tar-1.5b (download 3.29 GB)", TAR_7B]
    assert TAR_7B not in hub.menu("tar", names) and "Tar-7B-v0.1" in hub.menu("tar", names)
    (tmp_path / "Tar-7B-v0.1").mkdir()
    for name in names[:2]:
        (tmp_path / name).write_bytes(b"x")
    assert hub.absent("Tar-7B-v0.1", "tar", [tmp_path]).id == "tar-7b"
    # A folder of that name with weights of one's own is what it is.
    (tmp_path / "Tar-7B-v0.1" / "model.safetensors").write_bytes(b"x")
    assert hub.resolve("Tar-7B-v0.1", "tar", [tmp_path], tmp_path) == tmp_path / "Tar-7B-v0.1"


def test_a_folder_of_several_files_may_lie_below(tmp_path: Path, without_hub: None) -> None:
    """As in the menu, which shows it as a local folder and no more as a download."""
    folder = tmp_path / "llms" / "Tar-1.5B"
    folder.mkdir(parents=True)
    for part in next(e for e in hub.entries("tar") if e.id == "tar-1.5b").files:
        (folder / part.name).write_bytes(b"x")
    assert hub.resolve("tar-1.5b", "tar", [tmp_path], tmp_path) == folder


def test_an_entry_behind_a_link_is_found_and_loops_end(tmp_path: Path, without_hub: None) -> None:
    """ComfyUI's lists follow links to folders."""
    (tmp_path / "disk" / "mar").mkdir(parents=True)
    (tmp_path / "disk" / "mar" / "mar-base.safetensors").write_bytes(b"x")
    models = tmp_path / "models"
    models.mkdir()
    try:
        (models / "linked").symlink_to(tmp_path / "disk")
        (models / "linked" / "mar" / "loop").symlink_to(models)
    except OSError:
        pytest.skip("links need rights on this system")
    assert resolve("mar-base", models) == models / "linked" / "mar" / "mar-base.safetensors"
    assert hub.absent("mar-large", "mar", [models]).id == "mar-large"


def test_thousands_of_files_are_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of menus and of entries: ComfyUI asks for all menus at once."""
    looked_at: list[str] = []
    place = hub._place

    def count(name: str, files: object) -> object:
        looked_at.append(name)
        return place(name, files)

    monkeypatch.setattr(hub, "_place", count)
    local = [f"many/{i}.safetensors" for i in range(3000)] + ["here/mar-large.safetensors"]
    menus = {family: hub.menu(family, local) for family in hub.KINDS}
    assert looked_at == local
    assert MAR_LARGE not in menus["mar"] and local[-1] in menus["mar"] and local[-1] not in menus["kl"]
    assert all(set(local[:3000]) <= set(menu) for menu in menus.values())
