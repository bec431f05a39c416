"""Dense attention of prompts: of one sequence or packed sequences, with or without windows and sinks."""
