"""Projects keys on their sequence's basis and writes the latents to pages."""
