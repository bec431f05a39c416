"""Attention of one query per sequence over its selected chunks, read in their stored form."""
