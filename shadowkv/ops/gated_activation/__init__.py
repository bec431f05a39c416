"""Gated activations of MLPs, activation(gate) * up (arXiv:2002.05202)."""
