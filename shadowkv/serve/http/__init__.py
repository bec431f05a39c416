"""HTTP: connections, what every request passes, errors, event streams, and what operators see."""
