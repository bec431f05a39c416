"""Rebuilds selected keys from their latents and rotates them."""
