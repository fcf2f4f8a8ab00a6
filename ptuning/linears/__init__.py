"""Adapter weights: LoRA, activated LoRA, DoRA, IA3 and bottlenecks: layout and parameters."""
