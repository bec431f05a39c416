"""Sorts the choices of tokens by expert, for products with experts' matrices."""
