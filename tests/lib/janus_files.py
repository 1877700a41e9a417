"""The recorded tiny Janus, as tests use it."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

from fastar_nodes.model_loaders.janus.loader import load_janus
from fastar_nodes.networks.janus import JanusModel
from safetensors.torch import load_file, save_file

FOLDER = Path(__file__).parents[1] / "parity" / "janus"
GRID = 4


def tiny_janus(dtype: str = "fp32") -> JanusModel:
    """The network ``original`` on its grid."""
    return replace(load_janus(FOLDER / "original", dtype), grid=GRID)


def one_file(path: Path) -> Path:
    """The network ``original`` with everything in the metadata of one file."""
    texts = {name: (FOLDER / f"original/{name}.json").read_text(encoding="utf-8") for name in ("config", "tokenizer")}
    state = load_file(FOLDER / "original/model.safetensors")
    save_file(state, path, metadata={**texts, "grid": str(GRID), "name": "Tiny Janus"})
    return path


def in_transformers_layout(folder: Path) -> Path:
    """The weights of ``original`` under transformers' names, with what images do not need."""
    rules = json.loads((FOLDER / "janus_rename.json").read_text())["rules"]
    state = {}
    for name, tensor in load_file(FOLDER / "original/model.safetensors").items():
        rule = next(rule for rule in rules if re.fullmatch(rule["from"], name))
        if rule["op"] == "copy":
            state[re.sub(rule["from"], rule["to"], name)] = tensor
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    text = json.loads((FOLDER / "original/config.json").read_text())["language_config"]
    (folder / "config.json").write_text(json.dumps({"model_type": "janus", "text_config": text}))
    shutil.copyfile(FOLDER / "transformers/tokenizer.json", folder / "tokenizer.json")
    return folder
