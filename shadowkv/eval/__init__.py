"""Quality evaluations."""
