"""Timing simulation of very many workers at once: arrays over workers instead of an event at a time.

It makes the same updates at the same times, to the last bit, as the coordinator does with the `TimingEngine`.
"""
