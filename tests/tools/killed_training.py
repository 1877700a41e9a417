"""A training that is killed at random points and resumed, and one that is not: prints whether their files are equal.

Usage: ``killed_training.py FOLDER SEED``. Every attempt is a forked process, so that the imports happen once. An attempt is killed at the
n-th event, n random: before and after every optimiser step, every write of a state file, and in the middle of one.
"""

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
import conftest  # noqa: E402, F401 - makes the package importable
import tiny_demo as tiny  # noqa: E402
import torch  # noqa: E402
from fastar_nodes.tools.training import recipes, training  # noqa: E402
from fastar_nodes.tools.training.command import Trainings  # noqa: E402
from timeouts import forked  # noqa: E402

STEPS, PICTURES = 3, 64


class Killed:
    """Kills this process at an event."""

    def __init__(self, at: int):
        self.left = at

    def event(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, owner: Any, name: str, torn: bool = False) -> None:
        """An event before and after every call; ``torn``: and one while half of the file is written."""
        original = getattr(owner, name)

        def wrapped(*args: Any, **about: Any) -> Any:
            self.event()
            out = original(*args, **about)
            if torn:
                path = Path(args[1])
                whole = path.read_bytes()
                path.write_bytes(whole[: len(whole) // 2])
                self.event()
                path.write_bytes(whole)
            self.event()
            return out

        setattr(owner, name, wrapped)


def attempt(out: Path, work: Path, at: int) -> bool:
    """Train the tiny autoencoder and MAR in a process that is killed at event ``at``; returns whether it ended."""
    child = os.fork()
    if not child:
        code = 1
        try:
            forked(300)
            killed = Killed(at)
            killed.around(torch, "save", torn=True)
            killed.around(Path, "write_bytes")
            killed.around(Path, "replace")
            killed.around(torch.optim.AdamW, "step")
            training.train.__defaults__ = (*training.train.__defaults__[:-1], 0.0)  # a save after every step
            recipes.KL, recipes.TARGET = tiny.KL, tiny.MAR
            job = training.Job(work, log=lambda line: None, steps=STEPS, images=PICTURES)
            if not (work / "kl done").exists():
                Trainings(job, out).kl()
                (work / "kl done").touch()
            Trainings(job, out).mar("mar")
            code = 0
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), f"the training ended with {status}"
    return status == 0


def main() -> int:
    folder, rng = Path(sys.argv[1]), random.Random(int(sys.argv[2]))
    torch.set_num_threads(1)
    assert attempt(folder / "whole", folder / "whole work", 1 << 30)
    kills = 0
    while not attempt(folder / "parts", folder / "parts work", rng.randint(1, 40)):
        kills += 1
    files = ("kl.safetensors", "mar.safetensors")
    equal = all((folder / "whole" / name).read_bytes() == (folder / "parts" / name).read_bytes() for name in files)
    left = [p.name for p in (folder / "parts").iterdir()]
    print(f"killed {kills} times, files {'equal' if equal else 'differ'}, left: {' '.join(sorted(left))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
