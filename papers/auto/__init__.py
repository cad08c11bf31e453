"""`auto` and the learning-rate rule "noise" on real jobs, against protocols that have their own tuned rate."""
