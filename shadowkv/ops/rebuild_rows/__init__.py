"""Rebuilds compressed pages of one sequence as plain rows for attention: keys after RoPE, and values."""
