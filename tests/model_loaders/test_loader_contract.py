"""What every loader does: strict names, finite weights, one sentence for a wrong file, a network that is ready and owns its weights."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.autoencoders import load_kl, load_vq
from fastar_nodes.model_loaders.families import KINDS, identify
from fastar_nodes.model_loaders.hybrid import load_hybrid
from fastar_nodes.model_loaders.llamagen import load_llamagen
from fastar_nodes.model_loaders.mar import load_mar
from fastar_nodes.model_loaders.tar import load_detokenizer, load_ta_tok, load_tar
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

pytest.importorskip("transformers", reason="the files of every kind include a text encoder")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fuzz"))

import seeds  # noqa: E402

# Loader and family by the stem of a file.
LOADERS: dict[str, tuple[Callable[..., Any], str]] = {
    "mar": (load_mar, "mar"),
    "kl": (load_kl, "kl"),
    "gpt": (load_llamagen, "llamagen"),
    "vq": (load_vq, "vq"),
    "dtok": (load_detokenizer, "dtok"),
    "ta_tok": (load_ta_tok, "ta-tok"),
    "tar": (load_tar, "tar"),
    "hybrid": (load_hybrid, "hybrid"),
}
FP32 = ("diffloss.net.final_layer.linear.", "quantize.")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A valid safetensors file of every kind, by its stem."""
    found = {
        s.path.stem: s.path for s in seeds.build(tmp_path_factory.mktemp("files")) if s.path.suffix == ".safetensors"
    }
    return {stem: found[stem] for stem in LOADERS}


@pytest.fixture(params=LOADERS)
def kind(request: pytest.FixtureRequest, files: dict[str, Path], tmp_path: Path):
    """A loader, the beginning of its messages, and a function that writes its file changed."""
    load, family = LOADERS[request.param]
    with safe_open(files[request.param], "pt") as file:
        metadata = file.metadata()

    def write(change: Callable[[dict], object] = lambda state: None) -> Path:
        state = load_file(files[request.param])
        change(state)
        save_file(state, tmp_path / "x.safetensors", metadata=metadata)
        return tmp_path / "x.safetensors"

    return load, f"{KINDS[family].field}: x.safetensors ", write


def network(model: Any) -> nn.Module:
    return getattr(model, "hybrid", None) or model.net


def refused(load: Callable[..., Any], path: Path, beginning: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        load(path)
    text = str(error.value)
    assert text.startswith(beginning) and words in text and "\n" not in text


def test_a_network_is_ready_and_owns_its_weights(kind) -> None:
    load, _, write = kind
    path = write()
    net = network(load(path))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    path.write_bytes(bytes(path.stat().st_size))
    assert not net.training and not any(p.requires_grad or p.is_meta for p in net.parameters())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize(
    ("name", "dtype"), [("auto", torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_dtype(kind, name: str, dtype: torch.dtype) -> None:
    load, _, write = kind
    for key, value in network(load(write(), name)).state_dict().items():
        always = any(key.removeprefix("mar.").startswith(prefix) for prefix in FP32)
        assert value.dtype == (torch.float32 if always else dtype), key


def test_dtype_is_checked_before_the_file(kind, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="^dtype: 'fp8'"):
        kind[0](tmp_path / "gone.safetensors", "fp8")


def test_names_are_strict(kind) -> None:
    load, beginning, write = kind
    path = write(lambda s: s.update(extra=torch.ones(1)))
    refused(load, path, beginning, "1 unexpected (extra)")
    state = load_file(write())
    expected = set(network(load(write())).state_dict())
    for name in sorted(state.keys() & expected)[::7]:
        refused(load, write(lambda s, name=name: s.pop(name)), beginning, "")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda t: torch.full_like(t, float("nan")), "NaN or infinite"),
        (lambda t: torch.full_like(t, float("inf")), "NaN or infinite"),
        (lambda t: torch.ones_like(t, dtype=torch.int64), "int64"),
        (lambda t: t.new_zeros(0, *t.shape[1:]), "empty or too large"),
        (lambda t: t.new_ones(*t.shape, 3), ""),
    ],
    ids=["nan", "infinite", "integers", "empty", "misshaped"],
)
def test_weights_are_finite_numbers_of_the_right_shape(kind, value, words: str) -> None:
    load, beginning, write = kind
    expected = network(load(write())).state_dict()
    name = next(n for n in sorted(load_file(write())) if n in expected and "norm" not in n)
    refused(load, write(lambda s: s.update({name: value(s[name])})), beginning, words)


def test_files_of_every_other_family_are_refused(kind, files: dict[str, Path], tmp_path: Path) -> None:
    load, beginning, write = kind
    own = identify(load_file(write()))
    for stem, path in files.items():
        family = LOADERS[stem][1]
        assert identify(load_file(path)) == family
        if family != own:
            (tmp_path / "x.safetensors").write_bytes(path.read_bytes())
            refused(load, tmp_path / "x.safetensors", beginning, f"holds {KINDS[family].noun}, not ")


def test_damaged_and_missing_files(kind, tmp_path: Path) -> None:
    load, beginning, write = kind
    data = write().read_bytes()
    for cut in (data[:-1], data[: len(data) // 2], data[:9], b"", b"<html>", b"\x80\x04N."):
        (tmp_path / "x.safetensors").write_bytes(cut)
        refused(load, tmp_path / "x.safetensors", beginning, "")
    save_file({"some.thing": torch.ones(1)}, tmp_path / "x.safetensors")
    refused(load, tmp_path / "x.safetensors", beginning, "some.thing")
    refused(load, tmp_path / "gone.safetensors", beginning.partition(" ")[0], "there is no file")


class Payload:
    """Creates a folder when it is unpickled without care."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self.canary,)


def test_a_pickle_runs_nothing(kind, tmp_path: Path) -> None:
    load, beginning, write = kind
    torch.save({"model": load_file(write()), "args": Payload(tmp_path / "canary")}, tmp_path / "x.pt")
    refused(load, tmp_path / "x.pt", beginning.partition(" ")[0], "")
    assert not (tmp_path / "canary").exists()
