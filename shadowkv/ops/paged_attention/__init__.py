"""Attention of one query per sequence over its exact pages."""
