"""Makes rows orthonormal: multiplies them by the inverse of a Cholesky factor."""
