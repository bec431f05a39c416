"""Model layers: plain torch modules for inference over packed tokens. The attention layer calls a cache."""
