"""Draws chunks at random from those that were not found."""
