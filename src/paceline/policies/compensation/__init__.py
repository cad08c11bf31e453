"""What a parameter server does about stale gradients: a factor on their step, or a correction of their values."""
