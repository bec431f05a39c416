"""Queries in 8 and in 4 bits, as the ops that search a 2-bit key sketch take them."""
