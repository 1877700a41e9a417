"""Sweeps of many images, their evaluation, and timings beside reference implementations. Part of a checkout only."""
