"""Faults injected into downloads: every one ends in the whole file or in one sentence, and the next try completes it."""

import hashlib
import os
import signal
import time
from pathlib import Path

import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders import download as transfer
from fastar_nodes.model_loaders import hub, pins
from test_download import CONTENT, REPO, Server, hidden, resolve, server  # noqa: F401

GIT = hashlib.sha1(b"blob %d\0" % len(CONTENT) + CONTENT).hexdigest()
WRONG = CONTENT[:5000] + b"!" + CONTENT[5001:]
DIGEST = hashlib.sha256(CONTENT).hexdigest()
forked = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def entry(**changes: object) -> hub.Entry:
    fields = {"id": "mar-base", "family": "mar", "file": "mar-base.safetensors", "repo": REPO, "revision": None}
    fields |= {"size": len(CONTENT), "sha256": None, "licence": "MIT", "decoder": "kl16"}
    return hub.Entry(**{**fields, **changes})


def refused(folder: Path, words: str) -> str:
    with pytest.raises(UserError, match=words) as error:
        resolve("mar-base", folder)
    text = str(error.value)
    assert text.startswith("checkpoint: mar-base.safetensors") and "\n" not in text and len(text) <= 400
    return text


def test_broken_at_every_tenth(server: Server, tmp_path: Path) -> None:  # noqa: F811
    for tenth in range(1, 10):
        server.break_at = len(CONTENT) * tenth // 10
        refused(tmp_path, "could not be downloaded")
        assert not (tmp_path / "mar-base.safetensors").exists()
        for part in hidden(tmp_path):
            assert CONTENT.startswith(part.read_bytes())
    server.break_at = None
    assert resolve("mar-base", tmp_path).read_bytes() == CONTENT and not hidden(tmp_path)


@pytest.mark.parametrize("etag", [DIGEST, GIT, hashlib.sha1(CONTENT).hexdigest()], ids=["sha256", "git", "sha1"])
def test_wrong_bytes_of_the_right_length(server: Server, tmp_path: Path, etag: str) -> None:  # noqa: F811
    server.etag, server.sends = etag, WRONG
    refused(tmp_path, "what arrived is not the file that was announced")
    assert not hidden(tmp_path) and not list(tmp_path.glob("mar*"))
    server.sends = CONTENT
    assert resolve("mar-base", tmp_path).read_bytes() == CONTENT


def test_an_etag_that_is_no_digest_leaves_the_record(server: Server, tmp_path: Path) -> None:  # noqa: F811
    server.etag = "5f3759df-1"
    path = resolve("mar-base", tmp_path)
    assert (tmp_path / "mar-base.safetensors.sha256").read_text() == f"{DIGEST}  mar-base.safetensors\n"
    path.unlink()
    server.sends = WRONG
    refused(tmp_path, "another file than the one downloaded first; delete its .sha256 file to accept it")
    assert not path.exists() and not hidden(tmp_path)
    (tmp_path / "mar-base.safetensors.sha256").unlink()
    assert resolve("mar-base", tmp_path).read_bytes() == WRONG


def test_a_file_that_changed_after_the_download(server: Server, tmp_path: Path) -> None:  # noqa: F811
    path = resolve("mar-base", tmp_path)
    later = time.time() + 10
    os.utime(path, (later, later))
    assert resolve("mar-base", tmp_path) == path, "its content is the same"
    path.write_bytes(WRONG)
    os.utime(path, (later + 10, later + 10))
    refused(tmp_path, "has the sha256 .* and mar-base.safetensors.sha256 states .*delete the file to download it again")
    path.unlink()
    assert resolve("mar-base", tmp_path).read_bytes() == CONTENT


def test_a_pinned_digest(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(hub, "_catalogue", lambda: (entry(sha256="0" * 64),))
    refused(tmp_path, "FastAR's catalogue expects 0000000000000000")
    assert not hidden(tmp_path) and not list(tmp_path.glob("mar*"))
    monkeypatch.setattr(hub, "_catalogue", lambda: (entry(sha256=DIGEST, revision="a" * 40),))
    assert hub.menu("mar", []) == ["mar-base (download 10 kB)"]
    path = resolve("mar-base", tmp_path)
    assert path.read_bytes() == CONTENT and server.requests[-1][1].endswith(f"/resolve/{'a' * 40}/mar-base.safetensors")
    (tmp_path / "mar-base.safetensors.sha256").unlink()
    assert resolve("mar-base", tmp_path) == path and pins.recorded(path) == DIGEST, "checked once"
    (tmp_path / "mar-base.safetensors.sha256").unlink()
    path.write_bytes(WRONG)
    refused(tmp_path, "and FastAR's catalogue states")


@pytest.mark.parametrize("at", [0, 17, 63])
def test_every_digit_of_a_digest_counts(
    server: Server,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at: int,
) -> None:
    """A digest that differs in one of its 64 digits: the catalogue's, and the one recorded at the first download."""
    other = DIGEST[:at] + ("0" if DIGEST[at] != "0" else "1") + DIGEST[at + 1 :]
    monkeypatch.setattr(hub, "_catalogue", lambda: (entry(sha256=other),))
    refused(tmp_path, "FastAR's catalogue expects")
    assert not list(tmp_path.glob("mar*"))
    monkeypatch.setattr(hub, "_catalogue", lambda: (entry(),))
    path = resolve("mar-base", tmp_path)
    monkeypatch.setattr(hub, "_catalogue", lambda: (entry(sha256=other),))
    refused(tmp_path, "has the sha256 .* and FastAR's catalogue states")
    monkeypatch.setattr(hub, "_catalogue", lambda: (entry(),))
    (tmp_path / "mar-base.safetensors.sha256").write_text(f"{other}  mar-base.safetensors\n")
    later = time.time() + 10
    os.utime(path, (later, later))
    refused(tmp_path, "has the sha256 .* and mar-base.safetensors.sha256 states")


def test_every_part_of_a_folder_is_checked(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    whole = entry(
        id="tar", family="tar", file="Tar", size=2 * len(CONTENT), decoder=None, parts=("config.json", "w.bin")
    )
    monkeypatch.setattr(hub, "_catalogue", lambda: (whole,))

    def get() -> Path:
        return hub.resolve("tar", "tar", [tmp_path], tmp_path)

    assert get() == tmp_path / "Tar"
    for part in whole.parts:
        assert pins.recorded(tmp_path / "Tar" / part) == DIGEST
    later = time.time() + 10
    (tmp_path / "Tar" / "config.json").write_bytes(WRONG)
    os.utime(tmp_path / "Tar" / "config.json", (later, later))
    with pytest.raises(UserError, match="^checkpoint: config.json has the sha256"):
        get()
    (tmp_path / "Tar" / "config.json").unlink()
    server.sends = WRONG
    with pytest.raises(UserError, match="^checkpoint: config.json could not be downloaded"):
        get()


@pytest.mark.parametrize("name", ["../x", "a/b", "a\\b", "C:x", "", "..", ".", "/etc/x", "x\0"])
def test_names_that_leave_the_folder(server: Server, tmp_path: Path, name: str) -> None:  # noqa: F811
    with pytest.raises(UserError, match="^checkpoint: .* is no plain file name"):
        transfer.download(REPO, name, tmp_path / "models")
    assert not server.requests and not (tmp_path / "models").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_fills_up(server: Server, tmp_path: Path) -> None:  # noqa: F811
    part = tmp_path / f".mar-base.safetensors.{DIGEST[:16]}.part"
    part.symlink_to("/dev/full")
    refused(tmp_path, "the disk is full")
    part.unlink()
    assert resolve("mar-base", tmp_path).read_bytes() == CONTENT


def test_a_slow_server_can_be_cancelled(server: Server, tmp_path: Path) -> None:  # noqa: F811
    server.drip = 0.2

    class Cancelled(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done >= 1000:
            raise Cancelled

    with pytest.raises(Cancelled):
        resolve("mar-base", tmp_path, progress=stop)
    server.drip = 0.0
    assert resolve("mar-base", tmp_path).read_bytes() == CONTENT and not hidden(tmp_path)


@forked
def test_killed_and_started_again(server: Server, tmp_path: Path) -> None:  # noqa: F811
    server.drip = 0.05
    child = os.fork()
    if not child:
        try:
            resolve("mar-base", tmp_path)
        finally:
            os._exit(0)
    while not any(part.stat().st_size >= 1000 for part in hidden(tmp_path)):
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    (part,) = hidden(tmp_path)
    assert CONTENT.startswith(part.read_bytes()) and not (tmp_path / "mar-base.safetensors").exists()
    server.drip = 0.0
    assert resolve("mar-base", tmp_path).read_bytes() == CONTENT
    assert any((wanted or "").startswith("bytes=") for wanted in server.ranges()), "it went on, not from the start"


@forked
def test_two_processes(server: Server, tmp_path: Path) -> None:  # noqa: F811
    server.drip = 0.05
    child = os.fork()
    if not child:
        code = 1
        try:
            code = resolve("mar-base", tmp_path).read_bytes() != CONTENT
        finally:
            os._exit(code)
    while not hidden(tmp_path):
        time.sleep(0.01)
    refused(tmp_path, "is already being downloaded")
    assert os.waitpid(child, 0)[1] == 0
    assert resolve("mar-base", tmp_path).read_bytes() == CONTENT
