"""Metrics: scores of an answer against its references."""
