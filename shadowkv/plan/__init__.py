"""The planner: what a policy takes and how fast it can be at best, before anything is loaded."""
