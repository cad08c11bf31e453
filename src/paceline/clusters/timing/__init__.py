"""Timing models of simulated clusters: compute-time distributions, slowdowns, network, server and traces."""
