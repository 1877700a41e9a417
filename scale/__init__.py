"""Sweeps of many images: shards drawn on any number of workers, a folder that holds them, and the curve made from it."""
