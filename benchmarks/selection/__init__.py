"""Compares rules by which a sketch selects tokens: how far decode steps are from full attention under each rule."""
