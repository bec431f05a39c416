"""Fidelity: how close policies are to full attention along its own text, in distributions, attention and selection."""
