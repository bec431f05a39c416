"""Attention of many queries over one block of keys, to be merged with others."""
