"""Model families: each module reads its config.json and names its weights."""
