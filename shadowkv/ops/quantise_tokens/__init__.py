"""Quantises rows of activations to 8-bit floats (float8_e4m3fn, arXiv:2209.05433) with one scale per row."""
