"""The planner: what memory a policy needs and how fast it can be at best, before anything is loaded."""
