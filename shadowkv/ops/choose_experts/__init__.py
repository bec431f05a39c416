"""Routers of mixtures of experts: which experts a token is given to, and how much each of them counts."""
