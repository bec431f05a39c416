"""Latents of keys on their sequence's basis, into pages."""
