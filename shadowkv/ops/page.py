"""The page size. ``csrc/constants.h`` defines the same number for kernels."""

PAGE = 64
"""Tokens in a page, in every pool and tier."""
