"""Graphs as Python scripts, as ComfyUI-to-Python-Extension writes them; to be run in ComfyUI's own Python.

Arguments: ComfyUI's folder, a base folder that has the pack in custom_nodes, and a JSON file of API prompts by name.
Every prompt becomes a script in the base folder, which runs at once. A line of the output tells of each: the name and
"ok", or what the script raised.
"""

import asyncio
import inspect
import json
import random
import runpy
import sys
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from comfy_device import OPTIONS

HEAD = """from nodes import NODE_CLASS_MAPPINGS
def get_value_at_index(obj, index):
    try:
        return obj[index]
    except KeyError:
        return obj["result"][index]
"""


def script_of(prompt: Mapping[str, Any], table: Mapping[str, Any]) -> str:
    """A script that calls the nodes of a prompt in their order; ``table`` is ComfyUI's, type to class."""
    lines = [HEAD, f"prompt = {dict(prompt)!r}", "extra_pnginfo = None"]
    for number in _in_order(prompt):
        kind, given = prompt[number]["class_type"], prompt[number]["inputs"]
        declared = table[kind].INPUT_TYPES()
        if kind == "PreviewImage" or not set(declared.get("required", {})) <= set(given):
            continue

        # 1. The class: from its module, if that has a name as in an import statement.
        module = table[kind].__module__
        if all(part.isidentifier() for part in module.split(".")):
            lines.append(f"from {module} import {kind}\nnode = {kind}()")
        else:
            lines.append(f"node = NODE_CLASS_MAPPINGS[{kind!r}]()")

        # 2. The inputs that its function takes, the hidden ones among them.
        function = table[kind].FUNCTION
        parameters = inspect.signature(getattr(table[kind](), function)).parameters
        takes_all = any(part.kind == part.VAR_KEYWORD for part in parameters.values())
        inputs = {name: _value(value, prompt) for name, value in given.items()}
        hidden = {"unique_id": repr(random.randint(1, 1 << 63)), "prompt": "prompt", "extra_pnginfo": "extra_pnginfo"}
        inputs |= {name: text for name, text in hidden.items() if name in declared.get("hidden", {})}
        texts = [f"{name!r}: {text}" for name, text in inputs.items() if takes_all or name in parameters]

        # 3. The call.
        lines.append(f"{_variable(number)} = node.{function}(**{{{', '.join(texts)}}})")

    return "\n".join(lines)


def _in_order(prompt: Mapping[str, Any]) -> Iterable[str]:
    """Ids of the nodes, each after those that it depends on."""
    done: dict[str, None] = {}

    def add(number: str) -> None:
        for value in prompt[number]["inputs"].values():
            if _is_link(value, prompt) and value[0] not in done:
                add(value[0])
        done[number] = None

    for number in prompt:
        if number not in done:
            add(number)
    return done


def _is_link(value: Any, prompt: Mapping[str, Any]) -> bool:
    return isinstance(value, list) and len(value) == 2 and value[0] in prompt


def _value(value: Any, prompt: Mapping[str, Any]) -> str:
    """An input as text of the script."""
    if _is_link(value, prompt):
        return f"get_value_at_index({_variable(value[0])}, {value[1]})"
    return repr(value)


def _variable(number: str) -> str:
    return f"made_{number.replace(':', '_').replace(' ', '_')}"


def main(core: str, base: str, prompts: str) -> None:
    sys.argv = ["main.py", *OPTIONS, "--base-directory", base, "--disable-api-nodes"]
    sys.argv += ["--database-url", "sqlite:///:memory:"]
    sys.path.insert(0, core)

    import comfy.options

    comfy.options.enable_args_parsing()

    import execution
    import server
    import torch

    import nodes

    torch.set_num_threads(1)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    execution.PromptQueue(server.PromptServer(loop))
    loop.run_until_complete(nodes.init_extra_nodes(init_api_nodes=False))

    for name, prompt in json.loads(Path(prompts).read_text(encoding="utf-8")).items():
        script = Path(base) / f"{name}.py"
        script.write_text(script_of(prompt, nodes.NODE_CLASS_MAPPINGS), encoding="utf-8")
        try:
            with torch.inference_mode():
                runpy.run_path(str(script))
            told = "ok"
        except Exception as problem:
            traceback.print_exc()
            told = f"{type(problem).__name__}: {problem}"
        print(f"RAN {name}: {told}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
