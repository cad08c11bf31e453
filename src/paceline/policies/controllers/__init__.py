"""Controllers: change the knobs of a protocol while training runs."""
