"""The sampler of NextStep, which generates one continuous token after another.

The files in reading order:

- ``settings.py``: what a user can set;
- ``nextstep.py``: the sampler; it explains the shapes;
- ``canvas.py``: the canvas, which holds the tokens so far; the branches of guidance; checks of a run's inputs;
- ``flow.py``: the diffusion of a token, as steps with coefficients, for each solver.
"""
