"""Rigazzi, "DC-S3GD: Delay-Compensated Stale-Synchronous SGD", 2019."""
