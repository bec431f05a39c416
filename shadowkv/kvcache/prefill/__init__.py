"""Prompts: new tokens of sequences, layer by layer, attended to exactly or sparsely and then stored."""
