"""Sequences and what they hold: layout, memory, page tables, and who holds which blocks."""
