"""Routing in mixtures of experts: which experts a token goes to, and the weight of each."""
