"""Gates of MLPs (arXiv:2002.05202): the activation of a gate times up."""
