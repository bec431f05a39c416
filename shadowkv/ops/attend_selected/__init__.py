"""Attention of one query per sequence over the chunks it selected, from the form they are stored in."""
