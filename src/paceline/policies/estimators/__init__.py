"""Estimators behind the controllers: update times, gain, convergence, stragglers, round-trip timeout."""
