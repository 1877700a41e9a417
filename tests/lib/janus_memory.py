"""Prints the growth of this process' own memory while a Janus is loaded
beyond the weights it keeps, and whether transformers was imported.

Arguments: a JSON file of names and shapes as
tests/parity/janus/janus_keys_1b_original.json, a folder for the file of zeros, the dtype.
"""

import json
import struct
import sys
import threading
import time
from pathlib import Path

import checkout  # noqa: F401  the package under its name
from fastar_nodes.model_loaders.janus.loader import load_janus
from janus_files import FOLDER


def own_memory() -> int:
    """Bytes of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def write(shapes: dict[str, list[int]], path: Path) -> None:
    """A safetensors file of bf16 zeros, without the memory that they would take."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2
        for n in shape:
            size *= n
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def main(keys: str, folder: str, dtype: str) -> None:
    write(json.loads(Path(keys).read_text())["keys"], Path(folder) / "model.safetensors")
    (Path(folder) / "tokenizer.json").write_bytes((FOLDER / "original/tokenizer.json").read_bytes())
    load_janus(FOLDER / "original", dtype)  # what the first load takes once
    began, done = own_memory(), threading.Event()
    peak = began

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, own_memory())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    net = load_janus(folder, dtype).net
    done.set()
    watcher.join()
    kept = sum(p.nbytes for p in net.parameters())
    print(peak - began - kept, kept, "transformers" in sys.modules)


if __name__ == "__main__":
    main(*sys.argv[1:])
