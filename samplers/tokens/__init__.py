"""Samplers of discrete tokens: LlamaGen, PAR, ZipAR, Tar, Jacobi decoding and MuLo-SD."""
