"""Sorts choices of tokens by expert, for products with experts' matrices, and sums the results of a token's experts."""
