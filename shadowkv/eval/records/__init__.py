"""Records of an evaluation: samples, their predictions, and the compared policies."""
