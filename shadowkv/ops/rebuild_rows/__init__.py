"""Rebuilds compressed pages as plain rows for attention: keys after RoPE, and values."""
