"""The order in which products of experts take tokens: those of one expert after the other's."""
