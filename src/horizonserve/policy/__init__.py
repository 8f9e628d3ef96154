"""Scheduling policies: plain data in, plain data out; time is an argument."""
