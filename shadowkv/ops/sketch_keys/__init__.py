"""The 2-bit sketch of keys, into pages."""
