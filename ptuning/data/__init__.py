"""Training data: records, rendered examples, batch order, micro-batches and the preflight check."""
