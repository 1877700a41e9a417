"""What a hostile pickle holds."""

import os
from pathlib import Path
from typing import Any


class Payload:
    """Unpickling this carelessly makes a folder."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)
