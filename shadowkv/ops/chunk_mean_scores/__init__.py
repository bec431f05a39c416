"""Scores chunks by their mean keys."""
