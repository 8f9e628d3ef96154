"""Load on a real server: start it, play traces against it, compare policies on it."""
