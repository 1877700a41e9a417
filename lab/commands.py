"""The lab's command line; README.md beside this file says which command makes which page of the docs."""

from __future__ import annotations

from collections.abc import Sequence

from ..cli.main import Commands, Program, run

MODULE = "python -m fastar_nodes.lab"
GROUPS: dict[str, Commands] = {
    "Sweeps of many images:": {
        "sweep": (".sweeps.sweep", "draw many images of every sampler and setting, on any number of workers"),
        "evaluate": (".sweeps.evaluate", "measure the images of a sweep: PSNR, SSIM, FID and others, with intervals"),
        "table": (".sweeps.table", "print speed, work and quality of every cell of a sweep"),
        "plot": (".sweeps.plot", "draw speed-up against quality of a sweep, with its Pareto front"),
    },
    "Seconds, operations and memory:": {
        "bench": (".work.bench", "the pack's bench, also with random weights of official sizes"),
        "gpu": (".gpu", "measure all samplers on a GPU with each speed, and print a table"),
        "operations": (".work.operations", "count the operations of samplers and the minimum time for them"),
        "presets": (".work.preset_work", "calls, rows and operations of the presets of full-size models"),
        "published": (".work.published", "the papers' speed-ups beside counts of the same configurations"),
        "fits": (".work.fits", "print the GPU memory that every model needs, in 16, 8 and 4 bits"),
    },
    "Single experiments:": {
        "equal": (".experiments.equal", "count the images of parallel decoding that equal serial decoding's, by dtype"),
        "dtypes": (".experiments.dtypes", "compare the images of a model in several dtypes"),
    },
    "The authors' code:": {
        "parity": (".parity.command", "compare this code with recorded results of the reference implementations"),
    },
    "Trainings:": {
        "train-latent-samplers": (".training.latent_command", "train MuLo-SD's latent samplers for a tokenizer"),
        "train-demo": (".training.command", "train the built-in demo checkpoints and the judge"),
    },
    "The docs:": {
        "figures": (".docs.figures", "make the tables and plots of the docs"),
        "headlines": (".docs.headlines", "write the summary tables of README and docs/benchmarks.md"),
        "models-table": (".docs.models_table", "write README's table of models"),
        "pictures": (".docs.pictures", "draw the icon, README's animation and the images of the help pages"),
        "gallery": (".docs.gallery", "draw the forty images of docs/gallery.md, each with its graph inside"),
        "thumbnails": (".docs.thumbnails", "draw the thumbnails of the templates"),
        "help-pages": (".docs.help_pages", "write inputs and outputs of the help pages, and the table of settings"),
        "translate": (".docs.translate", "write the translated texts of nodes, menu groups and messages"),
    },
    "Releases:": {
        "release": (".release.release", "check that the pack is ready to be published"),
    },
}
PROGRAM = Program(MODULE, "What the authors of FastAR run, in a checkout of the repository.", GROUPS, __package__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command of the lab; returns its exit code, see :func:`cli.main.run`."""
    return run(PROGRAM, argv)
