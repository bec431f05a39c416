"""The chunks whose mean represents their keys worst."""
