"""Cached and new keys and values of packed sequences, one sequence after the other."""
