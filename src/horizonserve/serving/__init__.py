"""The vLLM-Omni adapter: the only package that imports the engine."""
