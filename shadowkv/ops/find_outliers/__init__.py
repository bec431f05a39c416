"""The chunks whose mean says least about their keys."""
