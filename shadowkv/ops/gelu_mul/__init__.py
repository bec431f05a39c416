"""The gate of a GeGLU MLP (arXiv:2002.05202)."""
