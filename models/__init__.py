"""Model definitions and configurations."""
