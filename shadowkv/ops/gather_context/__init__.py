"""Gathers the cached and the new keys and values of packed sequences, one sequence after another."""
