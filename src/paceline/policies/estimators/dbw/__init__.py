"""Estimators of DBW: the gain of an update of k gradients, and its duration."""
