"""Sealed pages of one sequence as plain rows for attention: keys rebuilt and RoPE-rotated, values decoded."""
