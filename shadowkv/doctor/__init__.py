"""What an engine would run on here: the backend of every op, why no faster one, and what would change that."""
