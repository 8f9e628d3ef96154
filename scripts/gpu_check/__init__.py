"""A check of what the project claims about one NVIDIA GPU; see docs/gpu_check.md."""
