"""Frozen parameters of a user's model, which stay with each rank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from paceline.checkpoint.fingerprint import digest_of
from paceline.jobs.local_shards import gathered, local_of
from paceline.recording.run_folder import MODEL
from paceline.tensors import tensor_file
from paceline.utils import files
from paceline.worker.write_watch import WriteWatch, sample_of


class FrozenParameters:
    """Frozen parameters of a rank's model.

    No version has them, because they may be the largest part of a model. The file of the trained model has those of
    rank 0. Those that the loop changes, as a teacher, are also in the checkpoints of each worker.

    Args:
        model: model of the user.
    """

    def __init__(self, model: nn.Module) -> None:
        self._frozen = {name: local_of(each) for name, each in model.named_parameters() if not each.requires_grad}
        self._writes = WriteWatch(self._frozen)
        self._changing: set[str] = set()

    def start(self) -> None:
        """Take the parameters as they are when the run starts."""
        self._writes.mark()

    def values(self) -> dict[str, Tensor]:
        """Return copies of the parameters that change."""
        self._changing.update(self._writes.changed())
        self._writes.mark()
        return {name: self._frozen[name].detach().clone() for name in sorted(self._changing)}

    @torch.no_grad()
    def restore(self, values: Mapping[str, Tensor]) -> None:
        """Continue with saved values.

        Raises:
            KeyError: a parameter of that name is missing, or not frozen.
            RuntimeError: a parameter has another shape.
        """
        for name, value in values.items():
            self._frozen[name].copy_(value)
        self._changing.update(values)
        self._writes.mark()

    def add_to(self, folder: str | Path | None) -> None:
        """Add these parameters to the file of the trained model, which a server has written without them.

        Raises:
            RunError: the file cannot be read or written.
        """
        if folder is None or not self._frozen or not (path := Path(folder) / MODEL).exists():
            return
        with files.writing(path, errors=(OSError, SafetensorError)):
            # safetensors takes no tensors that share memory.
            own = {name: each.detach().cpu().contiguous().clone() for name, each in self._frozen.items()}
            files.replace_file(path, tensor_file.to_bytes({**tensor_file.from_bytes(path.read_bytes()), **own}))


def frozen_digest(model: nn.Module) -> str:
    """Return a digest of evenly spaced elements of the frozen parameters, of all their shards; empty without any.

    All ranks that have the shards of a model call this together.
    """
    frozen = {name: local_of(each) for name, each in model.named_parameters() if not each.requires_grad}
    if not frozen:
        return ""
    own = digest_of({name: sample_of(each) for name, each in frozen.items()})
    return digest_of(gathered(own, model))
