"""Run reporting: progress bar, CSV and TensorBoard logs, and the HTML report."""
