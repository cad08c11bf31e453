"""Every named protocol without a server, with its paper."""

from numbers import Integral

from paceline.errors import UsageError
from paceline.policies.compensation.delay import DCS3GD
from paceline.protocols.allreduce import AllReduceConfig
from paceline.protocols.outer_optimizer import DelayedNesterov, parse_outer
from paceline.protocols.protocol import Phase, Protocol
from paceline.utils.argument_types import checked_types
from paceline.utils.validation import check_range


@checked_types
def all_reduce() -> Phase:
    """All-reduce SGD: no server; every worker waits for the mean gradient and steps with it.

    Paper: Goyal et al., "Accurate, large minibatch SGD", 2017; PyTorch's DistributedDataParallel.
    """
    return _serverless(AllReduceConfig(sums="gradients"), "all_reduce")


@checked_types
def local_sgd(H: int, outer: str | None = None, lag: int = 0, fragments: int = 1) -> Phase:
    """Local SGD: no server; every worker steps by itself, and all average their parameters every H gradients.

    Args:
        H: number of gradients of each worker from one average to the next, >= 1.
        outer: outer optimizer of the average, as "nesterov(lr=0.7, momentum=0.9)" of DiLoCo, or "sgd(lr=1)"; the mean
            of the parameters if not given.
        lag: number of gradients that each worker computes while a sum is under way, >= 0; with H, the sum has the time
            of all local steps, and 0 waits for it.
        fragments: number of fragments of the model, a divisor of H; one is averaged every H / fragments gradients, so
            that each message is shorter by this factor.

    Paper: Stich, "Local SGD converges fast and communicates little", 2019; Douillard et al., "DiLoCo", 2023. With a
    lag: Shen et al., "CoCoD-SGD", 2019. Kale et al., "Eager updates for overlapped communication and computation in
    DiLoCo", 2025, give a worker's own steps the weight of one worker until the sum arrives; here it keeps them whole.
    With fragments: Douillard et al., "Streaming DiLoCo with overlapping communication", 2025, which mixes the average
    of a fragment with the worker's own parameters when its sum arrives; here the worker adds its own steps since the
    sum began to that average.
    """
    check_range("[1, inf)", Integral, H=H, fragments=fragments)
    if H % fragments:
        raise UsageError(
            f"local_sgd: fragments={fragments}, expected a divisor of H={H}; type for example "
            f"H={-(-H // fragments) * fragments}"
        )
    optimizer = parse_outer(outer) if outer is not None else None
    if isinstance(optimizer, DelayedNesterov):
        raise UsageError(
            f"local_sgd: {optimizer} is for updates of single gradients; type outer='nesterov', or "
            f"asp + local_steps(H={H}, outer='{optimizer!r}')"
        )
    told = f", outer='{optimizer!r}'" if optimizer is not None else ""
    told += f", lag={lag}" if lag else ""
    told += f", fragments={fragments}" if fragments > 1 else ""
    allreduce = AllReduceConfig(sums="updates", period=H, outer=optimizer, lag=lag, fragments=fragments)
    return _serverless(allreduce, f"local_sgd(H={H}{told})")


@checked_types
def s3gd(lag: int = 1) -> Phase:
    """Stale-synchronous SGD: no server; the next gradients are computed during the all-reduce of the updates.

    Args:
        lag: number of gradients that each worker computes while a sum is under way, >= 1.

    Paper: Rigazzi, "DC-S3GD", 2019, without its compensation.
    """
    check_range("[1, inf)", Integral, lag=lag)
    return _serverless(AllReduceConfig(sums="updates", lag=lag), "s3gd" if lag == 1 else f"s3gd(lag={lag})")


@checked_types
def dc_s3gd(lambda0: float = 0.2, lag: int = 1) -> Phase:
    """Delay-compensated stale-synchronous SGD: `s3gd` with corrected gradients; after a plus, the correction alone.

    Args:
        lambda0: length of the correction relative to the gradient, in [0, 1e30]; 0.2 in the paper.
        lag: number of gradients that each worker computes while a sum is under way, >= 1; 1 in the paper, which names
            more of them as an outlook (Sect. V).

    Paper: Rigazzi, "DC-S3GD: delay-compensated stale-synchronous SGD", 2019, Algorithm 1 and eq. 7 to 12, 17.
    """
    check_range("[1, inf)", Integral, lag=lag)
    correction = DCS3GD(lambda0)
    name = repr(correction).removesuffix("()")
    if lag > 1:
        name = f"{name.removesuffix(')')}, lag={lag})" if "(" in name else f"{name}(lag={lag})"
    return _serverless(AllReduceConfig(sums="updates", lag=lag, correction=correction), name)


def _serverless(allreduce: AllReduceConfig, name: str) -> Phase:
    return Phase(Protocol(quorum="all", max_staleness=0, refill="update", name=name), allreduce=allreduce)


SERVERLESS = {factory.__name__: factory for factory in (all_reduce, local_sgd, s3gd, dc_s3gd)}
