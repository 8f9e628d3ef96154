"""Seeded request traces, without any engine."""
