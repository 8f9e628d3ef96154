"""Offline sweeps: what a model takes on this machine."""
