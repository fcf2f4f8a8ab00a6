"""P-tuning trainer: prompt-tuning, p-tuning and prefix-tuning adapters for a frozen GPT model."""
