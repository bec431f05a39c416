"""Fidelity: how close policies are to full attention along the text that full attention generates."""
