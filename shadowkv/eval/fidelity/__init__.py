"""Fidelity: how close policies' distributions and attention are to those of full attention, on the text that full
attention generates."""
