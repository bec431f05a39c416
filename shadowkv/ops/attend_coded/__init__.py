"""Attention of one query per sequence over all tokens of a segment, read in their stored form."""
