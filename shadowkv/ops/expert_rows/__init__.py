"""Sorts the choices of tokens by expert, for products with the experts' matrices, and sums the results of each token's
experts."""
