"""Base and LoRA computation side by side (HALO 4)."""
