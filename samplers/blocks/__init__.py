"""The sampler of BitDance, which generates an image as blocks of binary tokens, one block after another."""
