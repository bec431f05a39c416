"""Measures servers from the outside, ours or another's: what a client sees."""
