"""Attention of one query per sequence over all tokens of a run of pages, read in their stored form."""
