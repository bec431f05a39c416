"""Latents of keys on the basis of their sequence, into pages."""
