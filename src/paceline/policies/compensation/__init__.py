"""Staleness compensation in the parameter server: a factor on the step, or a correction of the gradient."""
