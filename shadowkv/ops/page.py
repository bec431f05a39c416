"""The page size, shared by all ops, pools and tiers; ``csrc/constants.h`` defines it for kernels."""

PAGE = 64
"""Tokens in a page, in every pool and tier."""
