"""A tuning run: preparation, training loop, validation, resumable state, artifacts and sweeps."""
