"""Finds outliers: the chunks that are represented worst by their mean key."""
