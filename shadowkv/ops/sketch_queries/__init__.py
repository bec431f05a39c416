"""Queries in 8 and in 4 bits, for the ops that search a 2-bit key sketch."""
