"""The planner. It computes memory, largest batch and shortest step time of policies before a model is loaded."""
