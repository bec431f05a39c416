"""How far steps are from full attention with other rules by which a sketch's tokens are selected."""
