"""Makes the 2-bit sketch of keys and writes it to pages."""
