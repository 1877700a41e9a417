"""Merge a LoRA that peft saved into the safetensors files of its model. Needs torch and safetensors.

    python docs/examples/merge_lora.py Janus-Pro-1B adapter my-janus

MODEL is the model's folder, of which OUT becomes a copy with merged weights. It works for any network whose files have
the names of the trained modules. For other kinds than plain LoRA (DoRA, rank-stabilised, ranks by layer) use peft's
merge_and_unload.
"""

import json
import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

OTHER_KINDS = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern")


def merge(model: Path, adapter: Path, out: Path) -> None:
    """Write a copy of a model's folder in which every weight W of the adapter is W + alpha / rank * B A."""
    settings = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8-sig"))
    other = [name for name in OTHER_KINDS if settings.get(name)]
    if other:
        sys.exit(f"{adapter} is no plain LoRA ({', '.join(other)}); merge it with peft's merge_and_unload.")

    scale = settings["lora_alpha"] / settings["r"]
    changes = load_file(adapter / "adapter_model.safetensors")
    merged = {}
    for file in sorted(model.glob("*.safetensors")):
        weights = load_file(file)

        for name in [name for name in changes if ".lora_A." in name]:
            target = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
            if target in weights:
                down = changes.pop(name).float()
                up = changes.pop(name.replace(".lora_A.", ".lora_B.")).float()
                weight = weights[target]
                weights[target] = (weight.float() + scale * up @ down).to(weight.dtype)
        merged[file.name] = weights

    if changes:
        sys.exit(f"{model} has no weights for {', '.join(list(changes)[:3])}; is it the model of this LoRA?")

    shutil.copytree(model, out, ignore=shutil.ignore_patterns("*.safetensors"))
    for name, weights in merged.items():
        save_file(weights, out / name, metadata={"format": "pt"})


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("give three folders: MODEL ADAPTER OUT")
    merge(*map(Path, sys.argv[1:]))
