"""Model families: what each reads from its config.json, and what it calls its weights."""
