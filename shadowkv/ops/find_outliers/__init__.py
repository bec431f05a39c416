"""Finds outliers, the chunks whose mean represents their keys worst."""
