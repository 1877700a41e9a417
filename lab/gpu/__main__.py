"""``python -m fastar_nodes.lab.gpu`` is ``python -m fastar_nodes gpu``."""

import sys

from ...cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["gpu", *sys.argv[1:]]))
