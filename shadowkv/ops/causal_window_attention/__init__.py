"""Attention of new tokens over those before them, within a window."""
