"""The weighted sum of what a token's experts made of it."""
