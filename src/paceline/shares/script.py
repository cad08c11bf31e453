"""Functions with which a script itself asks for shares, and the patches of its rank."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from paceline.errors import UsageError
from paceline.shares.settings import BalanceSettings
from paceline.utils.argument_types import checked_types
from paceline.utils.validation import check_range

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import DataLoader

    from paceline.shares.patches import Patches
    from paceline.shares.survival.surviving_training import SurvivingTraining

    Model = TypeVar("Model", bound=nn.Module)

_patches: list[Patches] = []  # of this rank, one at most
_errors: list[BaseException] = []  # which have ended the script, one at most


def install_patches(settings: BalanceSettings, survival: SurvivingTraining | None = None) -> Patches:
    """Replace the functions of torch in this rank, once."""
    from paceline.shares.patches import Patches

    if not _patches:
        patches = Patches(settings, survival)
        patches.install()
        _patches.append(patches)
        atexit.register(_end, patches)
        sys.excepthook = partial(_show_error, patches, sys.excepthook)
        sys.exit = partial(_exit, patches, sys.exit)
    return _patches[0]


def end_balancing() -> None:
    """Put the functions of torch back, and end what was balanced before: the script attaches its model."""
    for patches in _patches:
        patches.remove()
        if patches.balancer is not None and patches.balancer.record is not None:
            _end(patches)
        patches.balancer = None


@checked_types
def balance(
    model: Model,
    loader: DataLoader[Any] | None = None,
    *,
    pieces: int = 8,
    max_share: float = 1.5,
    weigh: Literal["auto", "samples", "tokens", "none"] = "auto",
    cost: Callable[[Any], float] | str | None = None,
    out: str | Path | None = None,
) -> Model:
    """Give each rank a share of the global batch by its speed; the parameters are those of equal shares.

    Called once after the model was wrapped, it does what ``paceline run`` does to a script that stays as it is. In a
    script without several ranks it changes nothing.

    Args:
        model: model in DistributedDataParallel, or sharded by ``fully_shard``.
        loader: loader of its training batches, to check at once that they can be shared; found by default.
        pieces: m; shares differ by pieces of max(1, floor(B / m)) of the B samples of a rank's batch, >= 1.
        max_share: largest share as a multiple of B, >= 1.
        weigh: what a rank's gradient counts: "samples" for a loss that is a mean over the samples of its batch,
            "tokens" for a mean over tokens that count, "none" for a sum; "auto" to read it from the first loss.
        cost: cost of a sample as a function of its index, or the path of a file of numpy with a cost for each; by
            default the length of its tokens, where the data set knows it; "none" to deal by speed alone.
        out: folder for the shares and times of the ranks, which ``paceline report`` shows; none by default.

    Returns:
        The model.

    Raises:
        UsageError: the model is no model of several ranks, it has a communication hook, the loader does not deal its
            samples to the ranks, or an argument is out of its range.
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from paceline.shares.rank_batches import is_dealt_by_rank
    from paceline.shares.refusals import refuse_others
    from paceline.shares.texts import refusal_of_loader

    folder = str(Path(out).absolute()) if out is not None else None
    settings = BalanceSettings(pieces=pieces, max_share=max_share, weigh=weigh, cost=cost, out=folder)
    is_sharded = hasattr(model, "_get_fsdp_state")
    if not is_sharded and not isinstance(model, DistributedDataParallel):
        raise UsageError(
            f"balance({type(model).__name__}), expected a model in DistributedDataParallel or sharded by fully_shard: "
            "call it after the model was wrapped"
        )
    if getattr(model, "_comm_hooks", None):
        raise UsageError("balance() of a model with a communication hook: leave the hook out")
    if loader is not None and not is_dealt_by_rank(loader.batch_sampler, dist.get_world_size()):
        raise UsageError(refusal_of_loader(loader, dist.get_world_size()))
    if dist.get_world_size() > 1 and (not _patches or _patches[0].balancer is None):
        patches = install_patches(settings)
        refuse_others()
        for module in model.modules() if is_sharded else [model]:
            if module is model or hasattr(module, "_get_fsdp_state"):
                patches.take_over(module)
    return model


@checked_types
def share(batch_size: int) -> int:
    """Return the number of samples of this rank's next batch, for a script that makes its batches itself.

    Without `balance` or ``paceline run`` it is the batch size. Call it once for each batch, in the order in which the
    batches are computed.

    Args:
        batch_size: samples of a batch with equal shares, >= 1, the same on every rank.

    Example:
        >>> share(16)
        16
    """
    check_range("[1, inf)", int, batch_size=batch_size)
    return _patches[0].share(batch_size) if _patches else batch_size


def _show_error(patches: Patches, show: Callable[..., object], kind: type, error: BaseException, trace: Any) -> None:
    """Show an error that ends the script, and that its batch had another size, if it had."""
    if patches.survival is not None:
        patches.survival.await_cause()
    show(kind, error, trace)
    _errors.append(error)
    patches.has_failed = True
    if not issubclass(kind, KeyboardInterrupt) and (hint := patches.hint(error)):
        print(hint, file=sys.stderr, flush=True)


def _exit(patches: Patches, leave: Callable[[Any], NoReturn], status: Any = None, /) -> NoReturn:
    """Leave the script, and note whether that is a failure: the other ranks are not waited for then."""
    patches.has_failed |= status not in (None, 0)
    leave(status)


def _end(patches: Patches) -> None:
    """End what is balanced, where a group that the script has destroyed has not ended it."""
    if patches.balancer is not None:
        patches.end_training(_errors[0] if _errors else None)
