"""Texts of a balanced script: what is taken over, and what cannot be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from paceline.jobs.loss_graph import Reading
from paceline.jobs.model_checks import batch_norm_of
from paceline.policies.shares import Pieces

WEIGHED = {
    "samples": "the loss is a mean, weighed by samples",
    "tokens": "the loss is a mean over tokens: all tokens of an update count alike, where torchrun averages the ranks",
    "none": "the loss is a sum, which needs no weight",
}
WITHOUT = "or start the script with torchrun"
EQUAL_FROM_HERE = "paceline: the script has made another process group, and what it trains there has equal shares"


def start_line(ranks: int, model: str, loader: Any, sizes: Pieces, weighing: str, costs: str) -> str:
    """Return what is taken over, in one line.

    Args:
        ranks: number of ranks.
        model: name of the model.
        loader: loader of its batches; None for batches of the script itself.
        sizes: sizes of a share.
        weighing: what backward passes are weighed by.
        costs: how the samples' costs are known; empty if they are not.
    """
    few = "; a batch below 4 samples can gain little" if sizes.batch_size < 4 else ""
    by_speed = f"{sizes.fewest} to {sizes.most} samples in steps of {sizes.size}"
    return (
        f"paceline: {ranks} ranks share the batches of {model} by their speed: {costs or by_speed} for "
        f"{sizes.batch_size} of {name_of_loader(loader)}{few}; {WEIGHED[weighing]}"
    )


def note_on_layers(model: nn.Module) -> str:
    """Return what to know of layers that see a batch as a whole; empty without any."""
    return "; batch normalization sees batches of these sizes" if batch_norm_of(model) else ""


def hint_of_size(samples: int, equal: int) -> str:
    """Return what may be the cause if a script fails at a batch of another size."""
    return (
        f"paceline: this rank's batch has {samples} samples, not {equal}: where the script counts on the batch size, "
        f"let it read len(batch), or ask paceline.share({equal}); {WITHOUT}"
    )


def hint_of_memory(samples: int, equal: int) -> str:
    """Return what to do if a batch of another size does not fit into memory."""
    return (
        f"paceline: this rank's batch has {samples} samples, not {equal}: give --max-share "
        f"{max(100, 100 * (samples - 1) // equal) / 100:.2f} or less, {WITHOUT}"
    )


def text_of_fall(rank: int, samples: int, equal: int) -> str:
    """Return what follows when a batch that is larger than with equal shares has run out of memory."""
    return (
        f"paceline: rank {rank} has run out of memory with {samples} samples, not {equal}: the update is given up, its "
        "samples are dealt again, and the share of this rank stays smaller"
    )


def refusal_of_loader(loader: Any, ranks: int) -> str:
    """Return why the batches of a loader cannot be cut, and what to do."""
    if loader is None:
        found = "no DataLoader has handed out the batch of this backward pass, unless under torch.no_grad()"
    else:
        sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        inner = getattr(sampler, "sampler", sampler)
        found = f"{name_of_loader(loader)} does not deal its samples to {ranks} ranks ({type(inner).__name__})"
    return (
        f"{found}: give the loader sampler=DistributedSampler(dataset), {WITHOUT}; a script that makes its own batches "
        "asks for the size of the next one: paceline.share(batch_size)"
    )


def refusal_of_repetition(loader: Any) -> str:
    """Return why batches that a script has kept cannot be computed again, and what to do."""
    return (
        f"the script computes batches of {name_of_loader(loader)} again that it has kept, as itertools.cycle(loader) "
        "does, and they have the sizes of earlier shares: iterate over the loader anew in each epoch, as by "
        f"while True: yield from loader, {WITHOUT}"
    )


def refusal_of_thread() -> str:
    """Return why batches cannot be trained on that another thread has taken, and what to do."""
    return (
        "the script takes its batches in another thread than the one that computes, so the ranks may divide an update "
        "by other shares: iterate over the loader where the model is trained, and let DataLoader(num_workers=2) load "
        f"ahead, {WITHOUT}"
    )


def refusal_of_places() -> str:
    """Return why ranks cannot go on that divide different samples, and what to do."""
    return (
        "the ranks do not divide the same samples: let every rank take the same number of batches from the loader "
        f"before each step, give its sampler the same seed and epoch on all ranks, {WITHOUT}"
    )


def refusal_of_loss(reading: Reading) -> str:
    """Return why a loss cannot be weighed, and what to do."""
    return (
        f"the graph of the loss does not show what it is a mean of ({reading.name}): give --weigh samples for a mean "
        "over the samples of a batch, --weigh tokens for a mean over tokens that count, --weigh none for a sum, or "
        f"a sum over a number that all ranks share, {WITHOUT}; a script that computes a batch in parts lets the loader "
        "hand out the parts"
    )


def refusal_of_parts(samples: int, part: int) -> str:
    """Return why a batch cannot be computed in parts, and what to do."""
    return (
        f"the script computes a batch of {samples} samples in parts of {part}, and a batch of another size would have "
        f"other parts: give the loader batch_size={part}, and make a step after {samples // part} of its batches, "
        f"{WITHOUT}"
    )


def refusal_of_weights() -> str:
    """Return why batches of several loaders cannot be computed in one backward pass."""
    return (
        "one backward pass computes batches of several loaders, of which each needs another weight now, as the last "
        f"batch of a loader does: give the loaders drop_last=True, or compute a backward pass for each, {WITHOUT}"
    )


def refusal_of_parameters() -> str:
    """Return why ranks whose parameters differ cannot go on, and what to do."""
    return (
        "the parameters of the ranks are not the same since their batches have unequal sizes: let what a step "
        "depends on, as a learning rate, follow from numbers that are the same on all ranks, not from len(batch), "
        f"{WITHOUT}"
    )


def refusal_of_pairs(reading: Reading) -> str:
    """Return why a loss cannot be computed from parts of a batch in which each sample is compared with all."""
    return (
        f"the loss ({reading.name}) compares each sample with all samples of the rank's batch, so it depends on its "
        "size: start the script with torchrun"
    )


def refusal_of_tokens(reading: Reading) -> str:
    """Return why a loss that was a mean over all samples can no longer be weighed by them."""
    return (
        f"the loss ({reading.name}) was a mean over all samples, and now is not, as where some are ignored: give "
        "--weigh tokens"
    )


def refusal_of_sum(reading: Reading) -> str:
    """Return why a sum cannot be weighed beside losses that are means."""
    return (
        f"the loss ({reading.name}) is a sum, and the first one was a mean over samples, so each needs another weight: "
        f"let all losses be means, or all sums, {WITHOUT}"
    )


def refusal_of_mean(reading: Reading) -> str:
    """Return why a mean cannot be weighed beside losses that are sums."""
    return (
        f"the loss ({reading.name}) is a mean, and the first one was a sum, so each needs another weight: let all "
        f"losses be means, or all sums, {WITHOUT}"
    )


def refusal_of_divisors(divisors: Sequence[float]) -> str:
    """Return why a sum over a number can no longer count as a sum."""
    shown = ", ".join(f"{each:g}" for each in divisors)
    return (
        f"the loss is a sum over a number that was the same on all ranks, and now is {shown}: give --weigh tokens for "
        "the rank's own number of tokens, --weigh none for a number of all ranks"
    )


def refusal_of_gather(function: str, sizes: Sequence[int]) -> str:
    """Return why tensors of unequal sizes cannot be exchanged."""
    return (
        f"{function} of tensors with {', '.join(map(str, sizes))} elements: the batches of the ranks have unequal "
        f"sizes; exchange a value of each rank, or use all_gather_object, {WITHOUT}"
    )


def refusal_of_sizes(first: int, other: int) -> str:
    """Return why loaders with batches of two sizes cannot be cut by the same shares."""
    return (
        f"the training loaders have batches of {first} and {other} samples, which the same shares do not cut into "
        f"whole samples: give them the same batch size, {WITHOUT}"
    )


def refusal_of_ends(ended: Sequence[int]) -> str:
    """Return why a rank cannot go on when others have come to the end of the script."""
    ranks = f"rank {ended[0]} has" if len(ended) == 1 else f"ranks {', '.join(map(str, ended))} have"
    return (
        f"{ranks} come to the end of the script, and this rank still waits in a collective operation: let each rank "
        "make as many iterations and collective operations as the others"
    )


def name_of_loader(loader: Any) -> str:
    """Return the names of a loader and its data set; None for batches of the script itself."""
    return f"{type(loader).__name__}({type(loader.dataset).__name__})" if loader is not None else "the script itself"


def name_of_model(model: nn.Module) -> str:
    """Return the name of a model, without what it is wrapped in."""
    return type(getattr(model, "module", model)).__name__


def unused_line(model: str) -> str:
    """Return that there was nothing to share."""
    return f"paceline: no backward pass of {model} was seen, so its batches were not shared"
