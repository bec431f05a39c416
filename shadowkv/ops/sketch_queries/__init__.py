"""Quantizes queries to 8 and to 4 bits, for the ops that search a 2-bit key sketch."""
