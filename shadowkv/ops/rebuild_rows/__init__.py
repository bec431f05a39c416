"""Sealed pages of one sequence as the plain rows that attention reads: keys rebuilt, after RoPE, and values decoded."""
