"""Dense attention of prompts: one sequence or packed sequences, with or without windows and sinks."""
