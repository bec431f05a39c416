"""Attention of prompts to all that they may see: of one sequence or of packed ones, within windows, with sinks."""
