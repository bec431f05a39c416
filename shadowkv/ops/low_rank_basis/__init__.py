"""The low-rank subspace that holds most of the energy of a sequence's keys."""
