"""Policies: learning-rate rules, staleness compensation, estimators and controllers."""
