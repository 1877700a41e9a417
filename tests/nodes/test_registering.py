"""What the pack registers with ComfyUI: nothing of it ends the server, and a second copy steps aside."""

import asyncio
import logging
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_comfy
import fastar_nodes
import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.nodes import filling, host, make_extension

SERVER = host.queue.PromptServer.instance


def _refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no")


def registered_nodes() -> set[str]:
    """Ids of the nodes of a new extension."""
    nodes = asyncio.run(make_extension().get_node_list())
    return {node.define_schema().node_id for node in nodes}


@pytest.fixture(autouse=True)
def host_folders(monkeypatch):
    """A ComfyUI to which nothing was registered."""
    monkeypatch.setitem(host.folders.folder_paths.folder_names_and_paths, "fastar", ([], set()))
    monkeypatch.setattr(SERVER, "routes", fake_comfy.Routes())


class _Full(fake_comfy.Routes):
    post = _refuse


_ROUTES = ("presets do not fill in their numbers", "prompt nodes do not show which words")
OPTIONAL = {
    "the routes": ("routes", _Full(), _ROUTES),
    "the table of routes": ("routes", None, _ROUTES),
    "the handler of prompts": ("add_on_prompt_handler", _refuse, ("an error only when the node runs",)),
}


@pytest.mark.parametrize("what", OPTIONAL)
def test_what_cannot_be_registered_is_said_and_the_nodes_are_there(what, monkeypatch, caplog):
    everything = registered_nodes()
    SERVER.routes.clear()
    name, broken, lost = OPTIONAL[what]
    monkeypatch.setattr(SERVER, name, broken)

    with caplog.at_level(logging.WARNING):
        assert registered_nodes() == everything and len(everything) > 20
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(lost)
    assert all(text.startswith("FastAR: ") and what in text for text, what in zip(said, lost, strict=True))


def test_without_its_folder_the_pack_is_not_loaded_and_the_server_goes_on(monkeypatch):
    """ComfyUI logs an Exception of an extension; anything else would end it."""
    monkeypatch.setattr(host.folders.folder_paths, "add_model_folder_path", _refuse)
    with pytest.raises(Exception, match="no"):
        make_extension()


def test_a_route_of_another_pack_is_left_alone(caplog):
    """The server would refuse to start with two handlers of one address."""
    SERVER.routes.post(filling.PATH)("theirs")
    registered_nodes()
    assert [route.handler for route in SERVER.routes if route.path == filling.PATH] == ["theirs"]
    assert f"the address {filling.PATH}" in caplog.text


@pytest.fixture
def first_copy(monkeypatch):
    """Lets ComfyUI know the nodes of a copy of the pack in a folder."""

    def load(folder: Path) -> None:
        module = ModuleType(str(folder))
        module.__file__ = str(folder / "__init__.py")
        monkeypatch.setitem(sys.modules, module.__name__, module)

        node = type("LoadMAR", (), {"__module__": module.__name__})
        core = SimpleNamespace(NODE_CLASS_MAPPINGS={"FastARLoadMAR": node})
        monkeypatch.setitem(sys.modules, "nodes", core)

    return load


def test_a_second_copy_registers_nothing_and_names_both_folders(first_copy, tmp_path, monkeypatch):
    first_copy(tmp_path / "fastar-nodes-main")
    monkeypatch.delitem(sys.modules, "fastar_nodes.nodes")
    with pytest.raises(UserError) as told:
        asyncio.run(fastar_nodes.comfy_entrypoint())

    here = Path(fastar_nodes.__file__).parent
    assert str(tmp_path / "fastar-nodes-main") in str(told.value) and str(here) in str(told.value)
    assert not SERVER.routes and "fastar_nodes.nodes" not in sys.modules


def test_a_second_copy_brings_no_scripts(first_copy, tmp_path):
    """WEB_DIRECTORY of the module, as ComfyUI's loader reads it before it asks for nodes."""

    def directory() -> Any:
        spec = spec_from_file_location("a_copy_of_the_pack", fastar_nodes.__file__)
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.WEB_DIRECTORY

    assert directory() == "./web"
    first_copy(tmp_path / "fastar-nodes-main")
    assert directory() is None


def test_a_copy_that_is_loaded_again_is_no_second_one(first_copy):
    first_copy(Path(fastar_nodes.__file__).parent)
    assert asyncio.run(fastar_nodes.comfy_entrypoint())
