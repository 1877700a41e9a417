"""The sampler of BitDance, which generates an image as blocks of binary tokens, one block after another.

The files in reading order:

- ``settings.py``: what a user can set;
- ``bitdance.py``: the sampler; it explains the shapes, the null branch and the token order;
- ``canvas.py``: the canvas, which holds the tokens so far, and what the transformer reads before the first block;
- ``checks.py``: checks of a run's inputs;
- ``diffusion.py``: the diffusion of a block, as steps with coefficients.
"""
