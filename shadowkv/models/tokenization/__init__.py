"""Text <-> token ids: tokenizers and chat templates."""
