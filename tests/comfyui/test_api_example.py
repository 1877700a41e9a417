"""ComfyUI's own API example, with a prompt of ours in the place of its own."""

import json
from importlib import import_module

from comfy_host import graph


def test_the_functions_of_the_example_get_an_image(comfy, tmp_path, monkeypatch):
    source = (comfy.core / "script_examples" / "websockets_api_example.py").read_text(encoding="utf-8")
    functions, _, rest = source.partition('prompt_text = """')
    assert rest
    (tmp_path / "core_api_example.py").write_text(functions, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    example = import_module("core_api_example")
    example.server_address = comfy.url.removeprefix("http://")

    socket = example.websocket.WebSocket()
    socket.connect(f"ws://{example.server_address}/ws?clientId={example.client_id}")
    images = example.get_images(socket, json.loads(json.dumps(graph(n3={"seed": 5}))))
    socket.close()
    assert images["8"][0].startswith(b"\x89PNG")
