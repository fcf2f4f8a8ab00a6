"""Planning: cost estimates and best configurations for training and serving a model.

Of the other packages, only `bench` imports this one. Predictions are computed without torch and
without running a model; only `planning.measurement` (`preamble plan calibrate` and `--measure`)
runs a model.
"""
