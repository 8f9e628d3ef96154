"""Shared by all tests."""

from hypothesis import settings

# Two cores that also run servers: a slow example is no failure.
settings.register_profile("horizonserve", deadline=None)
settings.load_profile("horizonserve")
