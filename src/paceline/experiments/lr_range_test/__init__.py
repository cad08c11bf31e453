"""Learning-rate range test: knee of the loss curve for each quorum."""
