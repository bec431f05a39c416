"""The gate of a SwiGLU MLP (arXiv:2002.05202)."""
