"""Arrivals of work, and the time at which an update is best closed."""
