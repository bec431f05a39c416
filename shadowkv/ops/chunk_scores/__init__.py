"""Scores of chunks by their mean keys or by bounds on their keys; outliers, which their mean key represents worst."""
