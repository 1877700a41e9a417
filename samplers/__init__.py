"""Samplers: each turns a model and a condition into latents or token codes, and writes a report.

Read ``engine.py`` first: it has the canvas, which holds the images so far, and the loop over the passes. Each kind of
model has a folder: ``mar/`` (masked tokens), ``tokens/`` (discrete tokens), ``blocks/`` (BitDance) and ``nextstep/``
(NextStep). The samplers of models with a diffusion head share six files. Read them in this order:
``diffusion_steps.py``, ``chain.py``, ``coupling.py``, ``step_equations.py``, ``speculation.py`` and ``annealing.py``.

The files use these words:

==============  ======================================================================================================
cell            a square of the image's grid. Cells are numbered row by row, from 0, and each holds one token
position        in ``mar/``, another word for a cell; in ``tokens/``, the cell that the position encoding of a fed
                token stands for
place           the index of a token in the order in which a model reads tokens
slot            an entry of the KV cache; it holds the keys and values of one place
branch          guidance runs a model on several conditions; each run is a branch. The *null* branch has no condition
batch row       one image in one branch: B images in P branches make R = P B batch rows
fed row         one token that a pass feeds to the transformer of a token model
row             in a diffusion: one token, or one block of tokens, that the head samples
pass            one run of the transformer, after which a sampler decides some cells; in ``mar/``, also *AR step*
call            one run of the diffusion head; in ``tokens/jacobi.py``, one run of the transformer that does the work of
                several passes
diffusion step  one of the steps from noise to a token. Usually, each step needs one call of the head; with speculation,
                one call can serve several steps
plan            the cells that each pass decides
condition       what the user asks for (classes, prompts, images). The *conditions z* of a diffusion head are something
                else: vectors that the transformer computes, one for each token that the head samples
window          several steps that are computed at once: diffusion steps (``speculation.py``) or passes of a token model
                (``tokens/jacobi.py``). In ZipAR, the number of tokens by which the row above must be ahead before
                a row of the grid starts
look            the function that runs the transformer in a pass
draw            the function that samples the cells' values from the output of the look
draft           a value that a cheap method proposes. The model verifies the value, and accepts or rejects it
==============  ======================================================================================================
"""
