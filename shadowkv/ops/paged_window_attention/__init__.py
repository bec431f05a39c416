"""Attention of one query per sequence over the exact pages that its window is in."""
