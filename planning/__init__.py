"""Planning: cost estimates and best configurations for training and serving a model.

Only `bench` imports this package. Predictions are computed without torch and without running a
model; only `planning.measurement` (`preamble plan calibrate` and `--measure`) runs a model.
"""
