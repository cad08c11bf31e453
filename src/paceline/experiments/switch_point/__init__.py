"""Search for the switch point between two protocols: bisection, trial runs, result."""
