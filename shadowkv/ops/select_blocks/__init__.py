"""Selects the blocks of keys that each tile of a long prompt's queries attends to."""
