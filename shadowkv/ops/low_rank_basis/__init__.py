"""The subspace that holds most of a sequence's keys."""
