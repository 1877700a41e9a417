"""Samplers of BitDance, which draws blocks of binary tokens one after another."""
