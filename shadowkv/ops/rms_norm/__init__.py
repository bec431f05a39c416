"""RMSNorm (arXiv:1910.07467)."""
