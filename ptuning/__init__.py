"""P-tuning trainer: learns prompt-tuning, p-tuning and prefix adapters for a frozen GPT."""
