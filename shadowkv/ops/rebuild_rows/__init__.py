"""Compressed pages of one sequence as the plain rows that attention reads: keys rebuilt, with RoPE, values
dequantised."""
