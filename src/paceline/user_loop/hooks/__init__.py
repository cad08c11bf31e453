"""Hooks in the thread of the user's loop: on its optimizer, its model, its losses and its signals."""
