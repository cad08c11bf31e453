"""Patches of torch that give a balancer its marks, from the first model of a script on."""

from __future__ import annotations

import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel

from paceline.shares.balancer import Balancer
from paceline.shares.collectives import patch_collectives
from paceline.shares.loader_patches import LoaderPatches
from paceline.shares.marks import call_at_end_of_graph
from paceline.shares.reach import ForwardPasses
from paceline.shares.refusals import OtherTraining, Refusing, check_group, unbalanced
from paceline.shares.settings import BalanceSettings
from paceline.shares.survival.steps import patch_meshes, patch_steps
from paceline.shares.survival.surviving_training import SurvivingTraining
from paceline.shares.texts import EQUAL_FROM_HERE
from paceline.utils.after_import import call_after_import

Function = Callable[..., Any]
COMPILED = "torch._dynamo.eval_frame"
FSDP = ("torch.distributed.fsdp._fully_shard", "torch.distributed._composable.fsdp")


class Patches:
    """Functions of torch that are replaced in this rank.

    Args:
        settings: settings of the shares.
        survival: survival of this rank, where others may be lost; None where they may not.

    Attributes:
        balancer: balancer of the models of this rank; None before the first, and once their training has ended.
        survival: as given.
        has_failed: whether an error has ended the script.
    """

    def __init__(self, settings: BalanceSettings, survival: SurvivingTraining | None = None) -> None:
        self.settings = settings
        self.survival = survival
        self.balancer: Balancer | None = None
        self.has_failed = False
        self._ended: Balancer | None = None
        self._is_over = False  # whether the process group of the training is destroyed
        self._is_told = False  # that what is trained after that has equal shares
        self._originals: list[tuple[Any, str, Any]] = []
        self._thread = threading.get_ident()
        self._is_in_backward = False
        self._is_in_compiled = False  # in a compiled model, of which the pass was noted before
        self._is_synced = True
        self._passes = ForwardPasses()
        self._other_training = OtherTraining()
        self._loaders = LoaderPatches(lambda: self.balancer, survival)
        self._asked: list[int] = []  # batches of the script itself before the first model

    def install(self) -> None:
        """Replace the functions by which a script makes its models, reads batches, computes gradients and waits."""
        self._replace(DistributedDataParallel, "__init__", self._with_init)
        for package in FSDP:  # of torch 2.6 and newer, and of older ones
            call_after_import(f"{package}._fsdp_state", partial(self._replace_state, package))
        call_after_import(COMPILED, lambda: self._replace_compiled(sys.modules[COMPILED].OptimizedModule))
        self._loaders.install(self._replace)
        self._replace(torch.autograd, "backward", self._with_backward)
        patch_collectives(lambda: self.balancer, self._replace)
        self._replace(dist, "destroy_process_group", self._with_destroy)
        if self.survival is not None:
            patch_steps(self.survival, self._replace)

    def remove(self) -> None:
        """Put the functions of torch back."""
        for owner, name, original in reversed(self._originals):
            setattr(owner, name, original)
        self._originals = []

    def take_over(self, module: torch.nn.Module, device: torch.device | None = None) -> None:
        """Balance a model in DistributedDataParallel, or a module that FSDP shards.

        Args:
            module: model or module.
            device: device on which it computes; None for that of its parameters.

        Raises:
            SystemExit: the model is not trained by all ranks alike.
        """
        if dist.get_world_size() == 1 or unbalanced:
            return
        if self._is_over:
            if dist.get_rank() == 0 and not self._is_told:
                print(EQUAL_FROM_HERE, file=sys.stderr, flush=True)
            self._is_told = True
            return
        with Refusing():
            if isinstance(module, DistributedDataParallel):
                check_group(module.module, dist.get_world_size(module.process_group))
            if self.balancer is None:
                device = device or next(module.parameters()).device
                self.balancer = Balancer(self.settings, module, device, self.survival)
        for size in self._asked:
            self.balancer.share(size)
        self._asked = []
        if not isinstance(module, DistributedDataParallel):
            self._leave_out_gathers(module)
        module.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        self._passes.watch(module)

    def end_training(self, error: BaseException | None) -> None:
        """Say what the shares have gained, or that there was nothing to share, and end the folder of the run.

        Args:
            error: error that ends the script; None without one.
        """
        self.has_failed |= error is not None
        self.end_ranks()
        if self.balancer is not None and (line := self.balancer.end_record(error)):
            print(line, file=sys.stderr, flush=True)
        self._ended = self.balancer or self._ended
        self.balancer = None

    def hint(self, error: BaseException) -> str:
        """Return what to look at, if an error comes from the size of a batch; empty if not."""
        balancer = self.balancer or self._ended
        return balancer.hint(error) if balancer is not None else ""

    def end_ranks(self) -> None:
        """End what is under way with the other ranks."""
        if self.balancer is not None:
            self.balancer.close()
        if self.survival is not None:
            self.survival.groups.finish(has_failed=self.has_failed)

    def share(self, batch_size: int) -> int:
        """Return the samples of the next batch, which the script makes itself."""
        if self.balancer is not None:
            with Refusing():
                return self.balancer.share(batch_size)
        self._asked.append(batch_size)
        return batch_size

    def _replace(self, owner: Any, name: str, patched: Callable[[Any], Any]) -> None:
        if hasattr(owner, name):
            original = getattr(owner, name)
            self._originals.append((owner, name, original))
            setattr(owner, name, patched(original))

    def _with_init(self, original: Function) -> Function:
        @wraps(original)
        def init(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            if self.survival is None:
                original(model, *args, **kwargs)
            else:
                given = inspect.signature(original).bind(model, *args, **kwargs).arguments
                self.survival.before_model(given["module"], given.get("process_group"))
                with self.survival.taking_any_root():
                    original(model, *args, **kwargs)
                self.survival.add_model(model)
            self.take_over(model)

        return init

    def _replace_state(self, package: str) -> None:
        self._replace(sys.modules[f"{package}._fsdp_state"].FSDPState, "init", self._with_state)
        if self.survival is not None:
            patch_meshes(self.survival, sys.modules[f"{package}._fsdp_common"], self._replace)

    def _with_state(self, original: Function) -> Function:
        @wraps(original)
        def init(state: Any, modules: Any, *args: Any, **kwargs: Any) -> None:
            original(state, modules, *args, **kwargs)
            for module in modules if isinstance(modules, tuple) else (modules,):
                if self.survival is not None:
                    self.survival.add_model(module)
                self.take_over(module, state._device)  # where the parameters may not be yet

        return init

    def _replace_compiled(self, compiled: type) -> None:
        self._replace(compiled, "__call__", self._with_compiled)

    def _with_compiled(self, original: Function) -> Function:
        @wraps(original)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            model = getattr(module, "_orig_mod", None)
            if not isinstance(model, DistributedDataParallel) or torch.compiler.is_compiling():
                return original(module, *args, **kwargs)
            self._before_forward(model, args, kwargs)
            self._is_in_compiled = True
            try:
                return original(module, *args, **kwargs)
            finally:
                self._is_in_compiled = False

        return call

    def _before_forward(self, model: torch.nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.balancer is None or not torch.is_grad_enabled() or torch.compiler.is_compiling() or _is_inner(model):
            return
        if self._is_in_compiled:
            return
        self._is_synced = bool(getattr(model, "require_backward_grad_sync", True))
        self._loaders.before_pass(self.balancer)
        with Refusing():
            self.balancer.forward_began(list(_shapes((inputs, kwargs))))

    def _leave_out_gathers(self, module: torch.nn.Module) -> None:
        """Stop the time while FSDP gathers the parameters of a module, and while it frees them."""

        def stop(*_: Any) -> None:
            if self.balancer is not None:
                self.balancer.stopwatch.stop()

        def start(*_: Any) -> None:
            if self.balancer is not None and torch.is_grad_enabled():
                self.balancer.stopwatch.start()

        module.register_forward_pre_hook(stop, prepend=True)  # before that of FSDP, which gathers
        module.register_forward_pre_hook(start)
        module.register_forward_hook(stop, prepend=True)
        module.register_forward_hook(start)

    def _with_backward(self, original: Function) -> Function:
        @wraps(original)
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            if unbalanced:
                self.balancer = None
            if self.balancer is None and not self._is_over:
                with Refusing():
                    self._other_training.backward_began()
            if self.balancer is None or self._is_in_backward or threading.get_ident() != self._thread:
                original(tensors, grad_tensors, *args, **kwargs)
                return
            self._is_in_backward = True
            is_reaching = False
            try:
                is_reaching, grads = self._begin_backward(self.balancer, tensors, grad_tensors)
                original(tensors, grads, *args, **kwargs)
            except torch.cuda.OutOfMemoryError:
                if not is_reaching or not self._gives_up(self.balancer):
                    raise
                is_reaching = False
            except RuntimeError as error:
                if KeyboardInterrupt.__name__ in str(error):  # torch makes an error of Ctrl-C in a thread of its own
                    raise KeyboardInterrupt from error
                raise
            finally:
                self._is_in_backward = False
            if is_reaching:
                self._end_backward(self.balancer)

        return _disable_dynamo(backward, recursive=False)  # a compiled step leaves it as it is

    @_disable_dynamo
    def _begin_backward(self, balancer: Balancer, tensors: Any, grads: Any) -> tuple[bool, Any]:
        """Return whether a pass reaches a model, and the gradients of its roots, which are weighed then."""
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if not self._passes.are_reached_by(roots):
            return False, grads
        with Refusing():
            weight = balancer.weight_of(roots[0])
        call_at_end_of_graph(roots[0], balancer.stopwatch.stop)
        if self.survival is not None:
            self.survival.begin_backward()
        return True, grads if weight == 1.0 else _weighed(roots, grads, weight)

    @_disable_dynamo
    def _end_backward(self, balancer: Balancer) -> None:
        if self.survival is not None and not self.survival.end_backward():
            balancer.sums_failed()
        elif self._is_synced:
            with Refusing():
                balancer.sums_ended()

    def _gives_up(self, balancer: Balancer) -> bool:
        """Return whether all ranks have given up an update whose backward pass needs too much memory on this one."""
        if self.survival is None or not self._is_synced or not balancer.has_run_out_of_memory():
            return False
        is_given_up = self.survival.fails_backward()
        balancer.sums_failed()
        return is_given_up

    def _with_destroy(self, original: Function) -> Function:
        @wraps(original)
        def destroy(group: Any = None) -> None:
            if group is None or group is dist.group.WORLD:
                error = sys.exc_info()[1]
                self.end_training(None if isinstance(error, SystemExit) and not error.code else error)
                self._is_over = True
                self._loaders.close()
            original(group)
            # Gloo's threads may still free the last backward pass, for which they need the interpreter's lock.
            # Were the model freed first, torch (2.13) would hold that lock and wait for them for ever.
            time.sleep(0.01)

        return destroy


def _is_inner(module: torch.nn.Module) -> bool:
    """Return whether a module is a part of a model that FSDP shards."""
    state_of: Any = getattr(module, "_get_fsdp_state", None)
    return state_of is not None and not state_of()._is_root


def _shapes(values: object) -> Iterator[Sequence[int]]:
    """Yield the shapes of tensors, also of those in mappings and sequences."""
    if isinstance(values, torch.Tensor):
        if values.dim():
            yield values.shape
    elif isinstance(values, Mapping):
        for each in values.values():
            yield from _shapes(each)
    elif isinstance(values, Sequence) and not isinstance(values, str):
        for each in values:
            yield from _shapes(each)


def _weighed(roots: list[torch.Tensor], grads: Any, weight: float) -> list[torch.Tensor]:
    """Return the gradients of the roots, each times the weight."""
    given = [grads] if isinstance(grads, torch.Tensor) or grads is None else list(grads)
    given += [None] * (len(roots) - len(given))
    return [
        torch.full_like(root, weight) if grad is None else grad * weight
        for root, grad in zip(roots, given, strict=True)
    ]
