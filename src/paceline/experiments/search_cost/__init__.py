"""Cost of a search for the switch point, over recorded runs."""
