"""The communication hook for DistributedDataParallel: Sum, Average or Adasum of its buckets.

model = torch.nn.parallel.DistributedDataParallel(model)
model.register_comm_hook(adasum.HookState(op=adasum.Adasum), adasum.ddp_hook)
"""

# No `from __future__ import annotations` here: torch compares a hook's annotations with classes.

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import Never

import collectives
from adasum.observer import ObservedGram, Observer, observe, require_observer
from adasum.optimizer.consistency.parameter_check import checks_parameters
from adasum.pass_counter import PassCounter
from adasum.real_pairs import real_numel
from adasum.reducer import gives_gram, observed_copy, require_declared
from adasum.request_pool import RequestPool, StartedRequest
from adasum.sparse import sparse_all_reduce_async
from collectives import Average, Group, Reducer, Request, Work, validation
from collectives.bootstrap.transport_selection import check_process_group
from collectives.execution.phases import require_carrier
from collectives.modes import outside_modes, untraced
from collectives.reducers import AnyReducer, from_torch
from collectives.tree_order import in_order

if TYPE_CHECKING or dist.is_available():
    from torch.distributed import GradBucket
    from torch.nn.parallel import DistributedDataParallel
else:
    GradBucket = Any

_logger = logging.getLogger(__name__)
# Arguments of other functions, and what to use with a hook.
_ELSEWHERE = {
    "backward_passes_per_step": "accumulate under model.no_sync()",
    "compression": "with DDP register fp16_compress_wrapper(adasum.ddp_hook) of torch's "
    "default_hooks; with FSDP pass register_fsdp_hook(wire_dtype=...) or MixedPrecisionPolicy",
    "group": "pass process_group=",
    "process_set": "pass process_group=",
    "weighted": "pass op=adasum.AdasumReducer(weighted=False)",
    "wire_dtype": "pass it to register_fsdp_hook",
}


class HookState:
    """How gradients are reduced: the state that DDP and FSDP hand to the hook.

    Models may share one state, and checkpoints need not contain it. Pickling leaves out
    `process_group`, with a warning. torch copies and pickles a DistributedDataParallel without its
    hook: call `register_comm_hook` on the copy.

    Args:
        op: Sum, Average, Adasum or a Reducer that says whether it `averages`. Average divides by
            the number of ranks, joined ones (`Join`) included.
        algorithm: "rechd/vhdd", "rd:16k:vhdd", ...; chosen by size unless given.
        process_group: The ranks that reduce, a torch ProcessGroup or a collectives.Group. Default:
            the group of `adasum.init()` or, without one, torch.distributed's world.
        observer: Sees every parameter's gradient before and after its reduction (DDP only; under
            `Join` it raises ValueError on ranks that have joined).
        timeout: Seconds each step may wait for a peer, if the hook makes the group.
        named_parameters: Names for the observer, as from model.named_parameters(). Without them,
            parameters are numbered in the order of their first reduction.
        check_parameters: Whether replicas compare a checksum of each unit's parameters at its first
            reduction (FSDP only: DDP broadcasts rank 0's parameters itself). Default: the
            environment variable ADASUM_CHECK_PARAMETERS, 0 or 1; True if that is not set.
        order: "tree", with Sum and Average: every element is summed by one balanced tree over the
            ranks, so that its bits do not depend on buckets, sizes, algorithm or transport. torch
            adds the passes under `no_sync()` from left to right: more than two do not make a
            balanced tree, and DDP's hook warns once, from the second step on.
        accumulate: With an order: torch.float32 to add in float32 and round once, at the end.
        **unknown: Anything else is an error that says what to use instead.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument or ADASUM_CHECK_PARAMETERS has a bad value.

    Examples:
        >>> state = hvd.HookState(op=hvd.Adasum, algorithm="rd")
        >>> state.op
        Adasum
    """

    # Weak, so that a state shared by models keeps none of them alive.
    _names: MutableMapping[Tensor, str]

    def __init__(
        self,
        op: AnyReducer = Average,
        algorithm: str | None = None,
        process_group: dist.ProcessGroup | Group | None = None,
        observer: Observer | None = None,
        timeout: float = 300.0,
        *,
        named_parameters: Iterable[tuple[str, Tensor]] = (),
        check_parameters: bool | None = None,
        order: str | None = None,
        accumulate: torch.dtype | None = None,
        **unknown: Never,
    ) -> None:
        require_known("HookState", unknown, _ELSEWHERE)
        op = from_torch("op", op)
        if not isinstance(op, Reducer):
            raise TypeError(f"op must be Sum, Average or Adasum, got {op!r}")
        require_declared(op)
        validation.timeout(timeout)
        if check_parameters is not None:
            validation.instance("check_parameters", check_parameters, bool, "a bool or None")
        require_observer(observer)
        if isinstance(named_parameters, Tensor):
            raise TypeError("named_parameters must be pairs of names and tensors, not a Tensor")
        if not isinstance(process_group, Group | None):
            check_process_group(process_group)
        self.op = in_order(op, order, accumulate)
        if algorithm is not None:
            require_carrier(algorithm, self.op)
        self.algorithm = algorithm
        self.process_group = process_group
        self.observer = observer
        self.timeout = timeout
        self.check_parameters = checks_parameters(check_parameters)
        self._names = WeakIdKeyDictionary({each: name for name, each in named_parameters})
        self._num_named = len(self._names)
        self._requests = RequestPool()
        self._passes = PassCounter()

    @property
    def group(self) -> Group:
        """The ranks that reduce; the first use may be collective."""
        given = self.process_group
        if given is None and collectives.is_initialized():
            given = collectives.default_group()
        if isinstance(given, Group):
            # DDP's and FSDP's communicators are on the GPU, too.
            given.transport.shares_gpu = True
            return given
        if given is None and dist.is_available() and dist.is_initialized():
            given = dist.group.WORLD
        if given is None:
            raise RuntimeError(
                "no ranks to reduce over: call adasum.init() or "
                "torch.distributed.init_process_group() first, or pass process_group="
            )
        return collectives.from_process_group(given, timeout=self.timeout)

    def start(
        self,
        buffer: Tensor,
        name: str,
        segments: Sequence[int],
        op: Reducer | None = None,
        *,
        observed: bool = False,
    ) -> StartedRequest:
        """Start reducing a buffer of whole segments in place, by `op` or else the state's.

        observed: whether Adasum keeps its Gram matrices, for `wait` to return.
        """
        group, op = self.group, op or self.op
        options: Any = {"name": name, "segments": segments, "algorithm": self.algorithm}

        def make() -> "Request[Tensor]":
            chosen = observed_copy(op) if observed else op
            return group.all_reduce_init(buffer, chosen, negotiate=False, **options)

        # The request keeps its operator alive, so the id stays unique.
        kind = buffer.dtype, buffer.device, id(op), observed
        key = name, tuple(segments), kind, self.algorithm
        return self._requests.start(group, key, make, buffer)

    def name_of(self, parameter: Tensor) -> str:
        """Return the parameter's name: unique, and the same at every call."""
        if parameter not in self._names:
            self._names[parameter] = f"parameter {self._num_named} {tuple(parameter.shape)}"
            self._num_named += 1
        return self._names[parameter]

    def __deepcopy__(self, memo: dict[int, Any]) -> "HookState":
        if dist.is_available() and any(
            isinstance(each, DistributedDataParallel) for each in list(memo.values())
        ):
            _logger.warning(
                "a copy of a DistributedDataParallel has no communication hook, and would average "
                "its gradients: call register_comm_hook on it before you train it"
            )
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        # Names of parameters that are copied along go to the copies.
        names = {memo.get(id(each), each): name for each, name in self._names.items()}
        copied.__dict__.update(
            self.__dict__,
            observer=copy.deepcopy(self.observer, memo),
            _names=WeakIdKeyDictionary(names),
            _requests=RequestPool(),
            _passes=PassCounter(),
        )
        return copied

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            _logger.warning(
                "HookState: process_group cannot be pickled and is left out: set it again after "
                "loading, or the state uses the group of adasum.init() or the world"
            )
        left_out = {"process_group": None, "_names": None, "_num_named": 0, "_requests": None}
        return {**self.__dict__, **left_out, "_passes": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Names and requests belong to the process that pickled the state.
        own = {"_names": WeakIdKeyDictionary(), "_requests": RequestPool()}
        self.__dict__.update(state, **own, _passes=PassCounter())


def require_state(state: object) -> None:
    """Raise TypeError unless it is a HookState."""
    if not isinstance(state, HookState):
        fix = ": pass adasum.HookState(op=...)" if isinstance(state, Reducer) else ""
        raise TypeError(f"state must be a HookState, got {type(state).__name__}{fix}")


def require_known(function: str, unknown: Iterable[str], advice: Mapping[str, str]) -> None:
    """Raise TypeError for an unknown argument, with the advice for it if there is any."""
    for name in unknown:
        fix = advice.get(name)
        raise TypeError(f"{function}() has no argument {name!r}" + (f": {fix}" if fix else ""))


@outside_modes()
def ddp_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce one of DDP's buckets in place, while backward goes on.

    Every parameter is its own segment, so its result does not depend on the others in its
    bucket: up to rounding always, and bit for bit with algorithm="rd" (shown on CPUs). All ranks
    get the same bits.

    Backward raises an error of the reduction unchanged, after DDP has finished its own part, so
    that the model can be used again if the group can. Ranks that have joined (`Join`) take part
    with DDP's zeros, Adasum's identity. Sparse gradients, which DDP hands over one by one, are
    reduced before the hook returns, and are not observed.

    Args:
        state: How to reduce.
        bucket: The bucket from DDP.

    Returns:
        A future of the bucket's buffer, which completes when the reduction ends.

    Raises:
        NotImplementedError: Adasum of a sparse gradient, or the hook is called by torch.compile's
            "python_reducer".
        RuntimeError: A gradient that is a view of the bucket was given other memory.

    Examples:
        >>> def train(model):
        ...     model = torch.nn.parallel.DistributedDataParallel(model)
        ...     model.register_comm_hook(hvd.HookState(op=hvd.Adasum), hvd.ddp_hook)
    """
    require_state(state)
    if not hasattr(bucket, "buffer"):
        raise NotImplementedError(
            "torch._dynamo.config.optimize_ddp='python_reducer' calls hooks with single gradients, "
            "not with DDP's buckets: set it to 'ddp_optimizer', the default"
        )
    buffer = bucket.buffer()
    name = f"DDP bucket {bucket.index()}"
    if buffer.is_sparse:
        return _future_of(sparse_all_reduce_async(state.group, buffer, state.op, name).wait())
    parameters = bucket.parameters()
    segments = [0, *accumulate(map(real_numel, parameters))]
    if state.op.ordered and (passes := state._passes.take(parameters)) > 2:
        # Warn once: the other buckets and later steps have as many passes.
        state._passes.close()
        _logger.warning(
            "%s: its gradients are sums of %d backward passes, which torch has added from left to "
            "right, so that they are not those of order='tree' on another number of ranks: use "
            'adasum.DistributedOptimizer(backward_passes_per_step=%d, order="tree") in the place '
            "of this hook, or at most two passes a rank",
            *(name, passes, passes),
        )
    moved = next((p for p in parameters if _is_moved(p.grad, buffer)), None)
    if moved is not None:
        # Ranks compare names: a gradient moved on one rank is an error on all.
        name += f" (the gradient of {state.name_of(moved)} was moved)"
    # Not public, but the only way to ask whether backward is running.
    if torch._C._current_graph_task_id() == -1:
        # It is not: this rank has joined, and has nothing else to do.
        if state.observer is not None:
            raise ValueError(
                "observer: cannot be used under Join, where ranks stop having gradients"
            )
        state.start(buffer, name, segments).wait()
        return _future_of(buffer)
    by_gram = state.observer is not None and gives_gram(
        *(state.observer, state.op, state.group, buffer),
        segments=segments,
        algorithm=state.algorithm,
    )
    show = _observe(state, bucket, by_gram=by_gram)
    reduction = state.start(buffer, name, segments, observed=by_gram)

    def finish() -> None:
        gram = reduction.wait()
        if moved is not None:
            raise RuntimeError(
                f"the gradient of {state.name_of(moved)} was moved out of its bucket, as `grad.data"
                " = ...` does, and DistributedDataParallel with gradient_as_bucket_view=True will "
                "not see it again: wrap the model anew, and assign to `grad` itself"
            )
        show(gram)

    _call_after_ddp(finish)
    return _future_of(buffer, reduction.work)


def _observe(
    state: HookState, bucket: GradBucket, *, by_gram: bool
) -> Callable[[ObservedGram | None], None]:
    """Show the bucket's gradients to the observer; return a function that shows the results."""
    if state.observer is None:
        return lambda _: None
    names = list(map(state.name_of, bucket.parameters()))
    gradients = [] if by_gram else _gradients_in(bucket)
    return observe(state.observer, names, gradients, by_gram=by_gram)


def _is_moved(gradient: Tensor | None, buffer: Tensor) -> bool:
    """Return whether a gradient is DDP's view of the bucket, but was given other memory.

    The gradient is the same tensor as DDP's own view of the bucket, so that view has moved too,
    and its part of the bucket is never written to again.
    """
    # Not public, but nothing else tells such a view from other gradients.
    base = None if gradient is None else gradient._base
    if gradient is None or base is None or base.shape != buffer.shape or not gradient.numel():
        return False
    # A wrapper of the hook may have replaced the buffer by a compressed copy.
    if base.data_ptr() != buffer.data_ptr() and base.dtype == buffer.dtype:
        return False
    return not 0 <= gradient.data_ptr() - base.data_ptr() < base.nbytes


def _gradients_in(bucket: GradBucket) -> list[Tensor]:
    """Return the bucket's gradients; it holds complex ones as pairs of reals.

    torch's own `gradients` counts complex elements instead of reals, and so returns wrong memory.
    If a wrapper of the hook sends another dtype, gradients stay pairs [..., 2], since torch may
    have no complex dtype for it.
    """
    parameters, buffer = bucket.parameters(), bucket.buffer()
    if not any(parameter.is_complex() for parameter in parameters):
        return bucket.gradients()
    parts = buffer.split([real_numel(parameter) for parameter in parameters])
    pairs = [part.view(*p.shape, 2) for part, p in zip(parts, parameters, strict=True)]
    if buffer.dtype != parameters[0].dtype.to_real():
        return pairs
    return [torch.view_as_complex(pair) for pair in pairs]


def _call_after_ddp(function: Callable[[], None]) -> None:
    """Call `function` when this backward ends, after DDP's own callback, which waits.

    DDP queues its callback in its last hook. One that is queued by a callback runs after that.
    """
    # Not public, but the only way to be called when backward ends; DDP uses it too.
    engine = torch.autograd.Variable._execution_engine
    # In a compiled step that calls backward, torch.compile would trace it.
    function = untraced(function)
    engine.queue_callback(untraced(lambda: engine.queue_callback(function)))


def _future_of(result: Tensor, work: Work | None = None) -> torch.futures.Future[Tensor]:
    """Return a torch Future of `result` that completes when the work ends, even in an error.

    DDP's C++ would hide an error in the future, as a result that is not a tensor, so a callback of
    `_call_after_ddp` raises it instead.
    """
    future: torch.futures.Future[Tensor] = torch.futures.Future(
        devices=[result.device] if result.is_cuda else None
    )

    if work is None:
        future.set_result(result)
        return future

    def complete() -> None:
        try:
            work.wait()
        except BaseException as error:  # noqa: BLE001 - backward raises it
            _logger.debug("%s", error)
        future.set_result(result)

    work.add_done_callback(complete)
    return future
