"""Scores chunks by their mean keys or by bounds on their keys, and finds the chunks that their mean key represents
worst."""
