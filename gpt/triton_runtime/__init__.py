"""Triton runtime: whether Triton works on a device, and the kernels that it compiles here."""
