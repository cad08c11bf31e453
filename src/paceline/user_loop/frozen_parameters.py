"""Frozen parameters of a user's model, which stay with each rank."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from torch import nn

from paceline.recording.run_folder import MODEL
from paceline.server import tensor_file
from paceline.server.zero_gradients import shortened
from paceline.utils import files
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)


class FrozenParameters:
    """Frozen parameters of a rank's model.

    No version has them, because they may be the largest part of a model. The file of the trained model has those of
    rank 0.

    Args:
        model: model of the user.
    """

    def __init__(self, model: nn.Module) -> None:
        self._frozen = {name: each for name, each in model.named_parameters() if not each.requires_grad}
        self._versions: list[int] = []  # version counters at the first look
        self._has_warned = False

    def look(self) -> None:
        """Warn once if one was written since the first look, as a teacher is."""
        now = [each._version for each in self._frozen.values()]
        self._versions = self._versions or now
        if self._has_warned or now == self._versions:
            return
        pairs = zip(self._frozen.items(), self._versions, strict=True)
        written = [name for (name, each), version in pairs if each._version != version]
        self._has_warned = True
        LOG.warning(
            "%s of the model changes although it is frozen: each rank keeps its own, and checkpoints of a server lack "
            "it. Make it a buffer (register_buffer), which all ranks and checkpoints share",
            shortened(written),
        )

    def add_to(self, folder: str | Path | None) -> None:
        """Add these parameters to the file of the trained model, which a server has written without them.

        Raises:
            RunError: the file cannot be read or written.
        """
        if folder is None or not self._frozen or not (path := Path(folder) / MODEL).exists():
            return
        with files.writing(path, errors=(OSError, SafetensorError)):
            own = {name: each.detach().cpu().contiguous().clone() for name, each in self._frozen.items()}
            files.replace_file(path, tensor_file.to_bytes({**tensor_file.from_bytes(path.read_bytes()), **own}))
