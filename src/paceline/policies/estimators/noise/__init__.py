"""Estimators from the noise of gradients and the course of the loss."""
