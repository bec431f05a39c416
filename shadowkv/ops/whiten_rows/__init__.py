"""Rows times the inverse of a Cholesky factor."""
