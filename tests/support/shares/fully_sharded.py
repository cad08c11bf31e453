"""`fully_shard`, which is public since torch 2.6."""

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:
    from torch.distributed._composable.fsdp import fully_shard

__all__ = ["fully_shard"]
