"""The gate of gpt-oss's MLPs: a SwiGLU of clamped numbers (arXiv:2508.10925)."""
