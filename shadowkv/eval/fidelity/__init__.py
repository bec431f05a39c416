"""How close policies come to full attention along its own text: distributions, attention per layer, selection."""
