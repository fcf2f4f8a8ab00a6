"""Planning: cost estimates and best configurations for training and serving a model.

`gpt`, `serving` and `ptuning` do not import this package. Estimates are arithmetic and do not
import torch; only calibration and measurement run a model.
"""
