"""Attention of one query per sequence over all tokens of a run of pages, read from the form that they are stored in."""
