"""Estimators that controllers decide by: numbers in, numbers out."""
