"""Samplers of BitDance, which generates blocks of binary tokens one after another."""
