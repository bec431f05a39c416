"""Attention of one query per sequence over the chunks it selected, read in their stored form."""
