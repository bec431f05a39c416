"""Text <-> token ids: tokenisers and chat templates."""
