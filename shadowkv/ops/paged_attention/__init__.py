"""Attention of one query per sequence over the sequence's exact pages."""
