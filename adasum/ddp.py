"""The reduction of DistributedDataParallel's gradient buckets, by Sum, Average or Adasum.

model = torch.nn.parallel.DistributedDataParallel(model)
model.register_comm_hook(adasum.HookState(op=adasum.Adasum), adasum.ddp_hook)
"""

# Annotations stay unpostponed here: torch compares those of a hook with the classes themselves.

import logging
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

import collectives
from adasum.sparse import sparse_all_reduce_async
from adasum.watch import Watcher
from collectives import Average, Group, Reducer, Work, validation

if TYPE_CHECKING or dist.is_available():
    from torch.distributed import GradBucket
else:
    GradBucket = Any

__all__ = ["HookState", "ddp_hook"]

_logger = logging.getLogger(__name__)


class HookState:
    """How gradients are reduced: what DDP and FSDP hand to the hook at every reduction.

    op: Sum, Average or Adasum. Average divides by the number of ranks, joined ones (`Join`)
    included. algorithm: its name ("rechd/vhdd", "rd:16k:vhdd", ...), chosen by size unless given.
    process_group: the ranks that reduce, a torch ProcessGroup or a collectives.Group; unless given
    those of `adasum.init()`, or, without it, torch.distributed's world. watch: is shown every
    parameter's gradient before and after (DDP only; not on ranks that have joined).
    named_parameters: the names a watcher is told, as model.named_parameters() gives them; unless
    given, parameters are numbered in the order in which they are first reduced.
    timeout: seconds a step may wait for a peer, where the hook makes the group.

    Holds nothing of any step: models may share one, and a checkpoint loses nothing without it.
    Pickling leaves out process_group, and says so in a warning.

    Raises TypeError or ValueError naming the argument.
    """

    def __init__(
        self,
        op: Reducer = Average,
        algorithm: str | None = None,
        process_group: dist.ProcessGroup | Group | None = None,
        watch: Watcher | None = None,
        timeout: float = 300.0,
        *,
        named_parameters: Iterable[tuple[str, Tensor]] = (),
    ) -> None:
        if not isinstance(op, Reducer):
            raise TypeError(f"op must be Sum, Average or Adasum, not {op!r}")
        if algorithm is not None:
            collectives.parse_all_reduce_spec(algorithm)
        validation.timeout(timeout)
        self.op = op
        self.algorithm = algorithm
        self.process_group = process_group
        self.watch = watch
        self.timeout = timeout
        self._names = {id(parameter): name for name, parameter in named_parameters}

    @property
    def group(self) -> Group:
        """The ranks that reduce; the first use may be a collective of all of them."""
        if isinstance(self.process_group, Group):
            return self.process_group
        if self.process_group is not None:
            return collectives.from_process_group(self.process_group, timeout=self.timeout)
        if collectives.is_initialized():
            return collectives.default_group()
        if dist.is_available() and dist.is_initialized():
            assert dist.group.WORLD is not None
            return collectives.from_process_group(dist.group.WORLD, timeout=self.timeout)
        raise RuntimeError(
            "no ranks to reduce over: call adasum.init() or torch.distributed.init_process_group() "
            "first, or pass process_group="
        )

    def name_of(self, parameter: Tensor) -> str:
        """The parameter's name, the same at every call and for no other parameter."""
        number = f"parameter {len(self._names)} {tuple(parameter.shape)}"
        return self._names.setdefault(id(parameter), number)

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            _logger.warning(
                "HookState: process_group cannot be pickled and is left out; where this state is "
                "loaded, it is that of adasum.init() or the world unless set again"
            )
        # Names are kept by the parameters' identity, which does not travel.
        return {**self.__dict__, "process_group": None, "_names": {}}


def require_state(state: object) -> None:
    """TypeError for what is no HookState."""
    if not isinstance(state, HookState):
        raise TypeError(f"state must be a HookState, not {type(state).__name__}")


def ddp_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's communication hook: reduces the bucket in place while backward goes on.

    Every parameter is a segment of its own, so its answer does not depend on what shares its
    bucket: to rounding always, and bit for bit with algorithm="rd" (shown on CPUs). All ranks
    end with the same bits.

    An error of the reduction is raised by backward as it is, after DDP has ended its own part, so
    that the model can go on where the group can. Ranks that have joined (`Join`) take part with
    DDP's zeros, Adasum's identity. Sparse gradients, which DDP hands over one by one, are reduced
    before the hook returns and are not watched; with Adasum they are a NotImplementedError.
    """
    require_state(state)
    buffer = bucket.buffer()
    name = f"DDP bucket {bucket.index()}"
    if buffer.is_sparse:
        return _completed(sparse_all_reduce_async(state.group, buffer, state.op, name).wait())
    gradients = bucket.gradients()
    segments = [0, *accumulate(gradient.numel() for gradient in gradients)]
    group = state.group
    options: dict[str, Any] = {
        "algorithm": state.algorithm,
        "name": name,
        "segments": segments,
    }
    if torch._C._current_graph_task_id() == -1:
        # Not in backward: this rank has joined, and has nothing to do meanwhile.
        if state.watch is not None:
            raise ValueError("watch: cannot be used under Join, where ranks stop having gradients")
        group.all_reduce(buffer, state.op, **options)
        return _completed(buffer)

    token: Any = None
    if state.watch is not None:
        names = [state.name_of(parameter) for parameter in bucket.parameters()]
        token = state.watch.sent(names, gradients)
    work = group.all_reduce(buffer, state.op, async_op=True, **options)
    assert isinstance(work, Work)

    def finish() -> None:
        work.wait()
        if state.watch is not None:
            state.watch.reduced(token, gradients)

    _after_ddp(finish)
    return _future(work, buffer)


def _after_ddp(function: Callable[[], None]) -> None:
    """Calls `function` at the end of this backward, after DDP's own callback, which waits.

    DDP's comes after the last hook's: of two callbacks, one queued by the other comes later still.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(function))


def _future(work: Work, answer: Tensor) -> torch.futures.Future[Tensor]:
    """A torch Future of `answer`, complete when the work has ended, well or not.

    DDP's C++ takes an error for an answer that is no tensor and hides it: backward raises it by
    `_after_ddp` instead.
    """
    future = _new_future(answer)

    def complete() -> None:
        try:
            work.wait()
        except Exception as error:  # noqa: BLE001 - backward raises it
            _logger.debug("%s", error)
        future.set_result(answer)

    work.add_done_callback(complete)
    return future


def _completed(answer: Tensor) -> torch.futures.Future[Tensor]:
    future = _new_future(answer)
    future.set_result(answer)
    return future


def _new_future(answer: Tensor) -> torch.futures.Future[Tensor]:
    return torch.futures.Future(devices=[answer.device] if answer.is_cuda else None)
