"""Kernels and their PyTorch references."""
