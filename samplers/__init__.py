"""Samplers: each turns a model and a condition into latents or token codes, and writes a report.

Read ``engine.py`` first: it has the canvas, the step and the loop. Each kind of model has a folder: ``mar/`` (masked
tokens), ``tokens/`` (discrete tokens), ``blocks/`` (BitDance) and ``nextstep/`` (NextStep). The samplers of models with
a diffusion head share, in reading order: ``diffusion_steps.py``, ``chain.py``, ``heads.py``, ``coupling.py``,
``speculation.py`` and ``annealing.py``.

Words that all files use:

==============  ======================================================================================================
cell            a square of the image's grid. Cells are numbered row by row, from 0, and each holds one token
position        in ``mar/``, another word for a cell; in ``tokens/``, the cell whose position encoding a fed token gets
place           the index of a token in the order in which a model reads tokens
slot            an entry of the KV cache, which holds the keys and values of one place
branch          guidance runs a model on several conditions; each is a branch. The *null* branch has no condition
batch row       an image in one branch: R batch rows are B images times the branches
fed row         one token that a pass feeds to the transformer of a token model
row             in a diffusion: the token, or the block of tokens, that is sampled
pass            one run of the transformer, which decides some cells; an *AR step* in ``mar/``
call            one run of the diffusion head; in ``tokens/jacobi.py``, one run of the transformer for several passes
diffusion step  one step from noise to a token. A diffusion has many, each with a call of the head
plan            the cells that each pass decides
condition       what the user asks for (classes, prompts, images). The *conditions z* of a diffusion head are different:
                the transformer computes them, one for each token that the head samples
window          several steps that are computed at once: diffusion steps (``speculation.py``) or passes of a token model
                (``tokens/jacobi.py``). In ZipAR, a window is how far a row stays behind the row above it
look            the function that runs the transformer in a pass
draw            the function that samples values of cells from the output of the look
draft           a value that a cheap method proposes, and that the model verifies: it is accepted or rejected
==============  ======================================================================================================
"""
