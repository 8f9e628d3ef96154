"""Latency promises for every kind of request of an omni model on one GPU."""

__version__ = "0.1.0"
