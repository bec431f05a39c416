"""Attention of one query per sequence over a sliding window in the sequence's exact pages."""
