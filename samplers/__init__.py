"""Samplers: each turns a model and a condition into latents or token codes, and writes a report.

Read the files in this order:

1. ``engine.py``: the canvas, which holds the images so far, and the loop over the passes.
2. The inputs of every sampler: ``settings.py`` (what a user can set), ``conditioning.py`` (what the images shall show),
   ``noise.py`` (the random numbers of a seed) and ``editing.py`` (the part of an image to regenerate).
3. Sampling with a diffusion head: ``diffusion_steps.py`` (the coefficients of the steps), ``chain.py`` (all steps of a
   batch), ``coupling.py``, ``step_equations.py`` and ``speculation.py`` (one call for several steps), and
   ``annealing.py`` (fewer steps in later passes).
4. A folder for each kind of model: ``mar/`` (masked tokens), ``tokens/`` (discrete tokens), ``blocks/`` (BitDance) and
   ``nextstep/`` (NextStep). The docstring of a folder gives the order of its files.

The files use these words:

==============  ======================================================================================================
cell            a square of the image's grid. Cells are numbered grid row by grid row, from 0, and each holds one token
position        the cell that the position encoding of a token stands for. In ``mar/``, another word for a cell
branch          guidance runs a model on several conditions; each run is a branch. The *null* branch has no condition
row             one of five kinds:

                - *grid row*: a line of cells
                - *batch row*: one image in one branch
                - *row of a diffusion*: one token, or one block of tokens, that the head samples
                - *fed row*, in ``tokens/``: one token that a pass feeds to the transformer
                - row of the encoder or decoder, in ``mar/``: one vector that it reads, for a token or as a *buffer row*
pass            one run of the transformer, after which a sampler decides some cells; in ``mar/``, also *AR step*
call            one run of the diffusion head; in ``tokens/jacobi.py``, one run of the transformer that does the work of
                several passes
diffusion step  one of the steps from noise to a token. Usually, each step needs one call of the head; with speculation,
                one call can serve several steps
plan            the cells that each pass decides
condition       what the user asks for (classes, prompts, images). The *conditions z* of a diffusion head are something
                else: vectors that the transformer computes, one for each token that the head samples
window          several steps that are computed at once: diffusion steps (``speculation.py``) or passes of a token model
                (``tokens/jacobi.py``). ZipAR has a window of its own, see ``tokens/``
look            the function that runs the transformer in a pass
draw            the function that samples the cells' values from the output of the look
draft           a value that a cheap method proposes. The model verifies the value, and accepts or rejects it
==============  ======================================================================================================

Shapes use these letters. A file names the letters that it adds, and the few that it uses in another sense:

======  ==============================================================================================================
B       images of a run
L       cells of an image, so also its tokens
P       branches of guidance
R       batch rows of a transformer: usually R = P B, branch by branch
N       rows of a diffusion
S       diffusion steps
D       width of the transformer: numbers in an output vector, and so in a condition z
c       channels: numbers in a token, if its value is a vector
======  ==============================================================================================================
"""
