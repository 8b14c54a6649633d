"""Several processes as one job: their start, what they must agree on, and their end."""
