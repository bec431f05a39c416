"""Scores of chunks by their mean keys."""
