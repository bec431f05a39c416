"""Scores of chunks by bounds on their keys."""
