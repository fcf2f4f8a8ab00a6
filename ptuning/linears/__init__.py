"""Adapter weights: LoRA, activated LoRA, DoRA and IA3, their layout and their parameters."""
