"""GPU proof: one command that tests and measures the GPU path, and records what it shows."""
