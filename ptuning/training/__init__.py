"""Training step: trainer, optimizer, pipeline schedule and its execution."""
