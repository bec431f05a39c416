"""The size of a page, which all ops, pools and tiers share; ``csrc/page.h`` has it for kernels."""

PAGE = 64
"""Tokens in a page, of every pool and tier."""
