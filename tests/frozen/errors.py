"""Calls that are refused, or that differ between ranks: each by name, on one rank's group.

What they raise is what the table has. After those of `ENDS` a group is of no more use.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any

import torch

import adasum
import collectives
from collectives import Action, Average, Collective, Group, Max, Schedule, Step, Sum, Transfer
from collectives.reducers import SumReducer
from tests.frozen.calls import line

Call = Callable[[Group], Any]

ones = torch.ones
F64, I32 = torch.float64, torch.int32
Adasum = adasum.Adasum
UNWEIGHTED = adasum.AdasumReducer(weighted=False)


def _spec(text: Any, op: Any = Sum) -> Call:
    return lambda group: group.all_reduce(ones(4), op, algorithm=text)


def _reduced(*args: Any, **options: Any) -> Call:
    """An all_reduce with arguments that are made anew in every rank, where they are functions."""

    def call(group: Group) -> Any:
        return group.all_reduce(*(each() if callable(each) else each for each in args), **options)

    return call


def _overlap(group: Group) -> Any:
    x = ones(8)
    return group.grouped_all_reduce([x[:5], x[4:]])


def _same_out(group: Group) -> Any:
    x = ones(group.size * 2)
    return group.reduce_scatter(x, out=x[:2])


def _inference(group: Group) -> Any:
    with torch.inference_mode():
        x = ones(4)
    return group.all_reduce(x)


def _inside_inference_mode(group: Group) -> Any:
    """Validation loops average their metrics there; the group then works outside of it, too."""
    with torch.inference_mode():
        answers = [
            *(adasum.allreduce(ones(3), op=op) for op in (Sum, Adasum)),
            group.all_reduce(ones(3)),
            group.all_reduce(ones(3), async_op=True).wait(),
            adasum.broadcast(torch.full((3,), float(group.rank)), 1),
            adasum.allgather(ones(1)),
            adasum.reducescatter(ones(group.size), op=Sum),
        ]
    # With the memory that was made in there, and with more.
    answers += [group.all_reduce(ones(3)), adasum.allreduce(ones(300_000), op=Sum)[:1]]
    return [answer.tolist() for answer in answers]


def _request_that(*methods: str) -> Call:
    """Call a request's methods one after the other; wait for it at last where it was started."""

    def call(group: Group) -> Any:
        request = group.all_reduce_init(ones(4))
        try:
            return [getattr(request, method)() for method in methods]
        finally:
            if methods[0] == "start":
                request.wait()

    return call


def _started_moved(group: Group) -> Any:
    x = ones(4)
    request = group.all_reduce_init(x, name="moved")
    x.data = ones(4)
    return request.start()


def _rebound(*tensors: Any) -> Call:
    return lambda group: group.grouped_all_reduce_init([ones(4), ones(2)]).start(list(tensors))


class _Unhashable:
    """Steps of an object with an equality of its own."""

    def __eq__(self, other: object) -> bool:
        return self is other

    def __call__(self, rank: int) -> list[Step]:
        return []


def _one_step(steps: Callable[[int], Any], chunks: int = 2) -> Call:
    def call(group: Group) -> Any:
        schedule = Schedule("mine", group.size, chunks, Collective.ALL_REDUCE, steps)
        return group.run(schedule, ones(8))

    return call


def _ring(group: Group) -> Schedule:
    """All sends at once, without the groups that an operator of whole vectors needs."""
    n = group.size

    def steps(rank: int) -> list[Step]:
        peers = [peer for peer in range(n) if peer != rank]
        return [
            Step(
                tuple(Transfer(peer, 0, 1) for peer in peers),
                tuple(
                    Transfer(peer, 0, 1, Action.REDUCE_LEFT if peer < rank else Action.REDUCE_RIGHT)
                    for peer in peers
                ),
            )
        ]

    return Schedule("all at once", n, 1, Collective.ALL_REDUCE, steps)


class _Doubled(SumReducer):
    """Reduces in a way of its own, which no library knows."""

    name = "Doubled"


class _Misspelt(SumReducer):
    needs = "every"  # type: ignore[assignment]


def _quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(ones(4), 1.0, 0, torch.qint8)


def _float8() -> torch.Tensor:
    return ones(2).to(torch.float8_e4m3fn)


REFUSED: dict[str, Call] = {
    "list": _reduced([1.0]),
    "none": _reduced(None),
    "strided": _reduced(lambda: ones(4, 4).t()),
    "sparse": _reduced(lambda: ones(4).to_sparse()),
    "meta": _reduced(lambda: ones(4, device="meta")),
    "conjugate": _reduced(lambda: ones(4, dtype=torch.complex64).conj()),
    "inference": _inference,
    "op_text": _reduced(lambda: ones(4), "sum"),
    "sum_bool": _reduced(lambda: ones(4, dtype=torch.bool), Sum),
    "average_bool": _reduced(lambda: ones(4, dtype=torch.bool), Average),
    "max_complex": _reduced(lambda: ones(4, dtype=torch.complex64), Max),
    "adasum_int": _reduced(lambda: ones(4, dtype=I32), Adasum),
    "adasum_bool": _reduced(lambda: ones(4, dtype=torch.bool), Adasum),
    "weighted_text": lambda group: adasum.AdasumReducer(weighted="no"),  # type: ignore[arg-type]
    "segments_short": _reduced(lambda: ones(4), segments=(0, 3)),
    "segments_start": _reduced(lambda: ones(4), segments=(1, 4)),
    "segments_descend": _reduced(lambda: ones(4), segments=(0, 3, 2, 4)),
    "segments_text": _reduced(lambda: ones(4), segments="04"),
    "segments_floats": _reduced(lambda: ones(4), segments=(0, 4.0)),
    "segments_tensor": _reduced(lambda: ones(4), segments=torch.tensor([0, 4])),
    "prescale_nan": _reduced(lambda: ones(4), prescale=float("nan")),
    "prescale_huge": _reduced(lambda: ones(4), prescale=10**400),
    "prescale_int": lambda group: group.all_reduce(ones(4), prescale=(2, 2.0)[group.rank % 2]),
    "postscale_text": _reduced(lambda: ones(4), postscale="2"),
    "name_number": _reduced(lambda: ones(4), name=7),
    "names_here": _reduced(lambda: ones(4), names=["a"]),
    "unknown_option": _reduced(lambda: ones(4), colour="red"),
    "out_here": _reduced(lambda: ones(4), out=ones(4)),
    "needs_text": _reduced(lambda: ones(4), _Misspelt()),
    "by_autograd": _reduced(lambda: ones(4, requires_grad=True) * 2),
    "quantized": _reduced(_quantized),
    "uint4": lambda group: group.all_to_all(torch.empty(group.size, dtype=torch.uint4)),
    "scale_bool": _reduced(lambda: ones(4, dtype=torch.bool), Max, prescale=0.5),
    "scale_int": _reduced(lambda: ones(4, dtype=torch.int64), prescale=-(2.0**63)),
    "scale_byte": _reduced(lambda: ones(4, dtype=torch.uint8), postscale=256.0),
    "scale_half": _reduced(lambda: ones(4, dtype=torch.bfloat16), postscale=1e50),
    "scale_complex": _reduced(lambda: ones(4, dtype=torch.complex64), prescale=1e39),
    "grouped_tensor": lambda group: group.grouped_all_reduce(ones(4)),  # type: ignore[arg-type]
    "grouped_entry": lambda group: group.grouped_all_reduce([ones(4), 7]),  # type: ignore[list-item]
    "grouped_overlap": _overlap,
    "grouped_names": lambda group: group.grouped_all_reduce([ones(1)], names=["a", "b"]),
    "grouped_names_text": lambda group: group.grouped_all_reduce([ones(1)], names="a"),
    "grouped_names_number": lambda group: group.grouped_all_reduce([ones(1)], names=[7]),  # type: ignore[list-item]
    "grouped_packed": lambda group: group.grouped_all_reduce([ones(1)], packed=1),  # type: ignore[call-overload]
    "grouped_int_adasum": lambda group: group.grouped_all_reduce(
        [ones(2), ones(2, dtype=I32)], Adasum
    ),
    "grouped_float8": lambda group: group.grouped_all_reduce([ones(2), _float8()]),
    "grouped_float8_average": lambda group: group.grouped_all_reduce([ones(2), _float8()], Average),
    "reduce_dst": lambda group: group.reduce(ones(4), group.size),
    "reduce_dst_text": lambda group: group.reduce(ones(4), "0"),  # type: ignore[call-overload]
    "reduce_adasum": lambda group: group.reduce(ones(4), 0, Adasum),
    "scatter_adasum": lambda group: group.reduce_scatter(ones(4), Adasum),
    "scatter_rows": lambda group: group.reduce_scatter(torch.tensor(1.0), by_rows=True),
    "scatter_out_shape": lambda group: group.reduce_scatter(ones(4), out=ones(9)),
    "scatter_out_dtype": lambda group: group.reduce_scatter(
        ones(2 * group.size), out=ones(2, dtype=F64)
    ),
    "scatter_out_same": _same_out,
    "scatter_out_meta": lambda group: group.reduce_scatter(ones(4), out=ones(2, device="meta")),
    "scatter_out_rows": lambda group: group.reduce_scatter(
        ones(2 * group.size, 3), by_rows=True, out=ones(6)
    ),
    "scatter_by_rows": lambda group: group.reduce_scatter(ones(3), by_rows=object()),
    "scatter_algorithm": lambda group: group.reduce_scatter(ones(4), algorithm="rd"),  # type: ignore[call-overload]
    "scatter_strided": lambda group: group.reduce_scatter(ones(3, 4).t()),
    "gather_out_list": lambda group: group.all_gather(ones(4), out=[ones(8)]),  # type: ignore[call-overload]
    "gather_out_strided": lambda group: group.all_gather(ones(4, 2), out=ones(2, 8).t()),
    "gather_scalar": lambda group: group.all_gather(torch.tensor(1.0)),
    "gather_out_dtype": lambda group: group.all_gather(ones(4), out=ones(8, dtype=F64)),
    "gather_out_shape": lambda group: group.all_gather(ones(4, 2), out=ones(8, 3)),
    "to_all_rows": lambda group: group.all_to_all(ones(2 * group.size + 1)),
    "to_all_splits": lambda group: group.all_to_all(ones(4), [1]),
    "to_all_many": lambda group: group.all_to_all(ones(4), [9] * group.size),
    "to_all_floats": lambda group: group.all_to_all(ones(4), [1.0] * group.size),  # type: ignore[list-item]
    "broadcast_root": lambda group: group.broadcast(ones(4), -1),
    "bytes_text": lambda group: group.all_gather_bytes("text"),  # type: ignore[arg-type]
    "owners_count": lambda group: group.reduce_to_owners([ones(4)], owners=[0, 0]),
    "owners_option": lambda group: group.reduce_to_owners_init([ones(4)], colour=1),  # type: ignore[call-arg]
    "owners_rank": lambda group: group.reduce_to_owners([ones(4)], owners=[group.size]),
    "from_owners_rank": lambda group: group.broadcast_from_owners([ones(4)], owners=[-1]),
    "split_twice": lambda group: group.split([0, 0]),
    "split_rank": lambda group: group.split([group.size]),
    "split_none": lambda group: group.split([]),
    "join_op": lambda group: group.join(["Sum"]),  # type: ignore[list-item]
    "join_device": lambda group: group.join(device=ones(1)),  # type: ignore[arg-type]
    "join_max": lambda group: group.join([Max]),
    "run_size": lambda group: group.run(line(group.size + 1), ones(4)),
    "run_no_schedule": lambda group: group.run("line", ones(4)),  # type: ignore[call-overload]
    "run_empty": _one_step(lambda rank: []),
    "run_unmatched": _one_step(
        lambda rank: [Step(sends=(Transfer(1, 0, 2),))] if rank == 0 else [Step()]
    ),
    "run_broadcast": lambda group: group.run(
        Schedule("mine", group.size, 2, Collective.BROADCAST, lambda rank: []), ones(8)
    ),
    "run_for_ever": _one_step(lambda rank: repeat(Step())),
    "run_no_step": _one_step(lambda rank: [None]),
    "run_no_transfer": _one_step(lambda rank: [Step(sends=((1, 0, 1),))]),
    "run_no_rank": _one_step(lambda rank: [Step(sends=(Transfer("1", 0, 1),))]),
    "run_no_action": _one_step(lambda rank: [Step(recvs=(Transfer(1, 0, 1, "copy"),))]),
    "run_messages": _one_step(lambda rank: [Step(sends=repeat(Transfer(1, 0, 1)))]),
    "run_ranks": _one_step(lambda rank: [Step(group=repeat(rank))]),
    "run_no_hash": _one_step(_Unhashable()),
    "run_beyond": _one_step(lambda rank: [Step(sends=(Transfer(1 - rank, 0, 3),))]),
    "run_adasum": lambda group: group.run(_ring(group), ones(4), Adasum),
    "start_twice": _request_that("start", "start"),
    "wait_unstarted": _request_that("wait"),
    "start_closed": _request_that("close", "start"),
    "start_released": _request_that("release", "start"),
    "start_moved": _started_moved,
    "rebind_count": _rebound(ones(4)),
    "rebind_shape": _rebound(ones(4), ones(3)),
    "rebind_dtype": _rebound(ones(4), ones(2, dtype=F64)),
    "rebind_meta": _rebound(ones(4), ones(2, device="meta")),
    "rebind_strided": _rebound(ones(4), ones(4)[::2]),
    "rebind_text": _rebound(ones(4), "tensor"),
    "wait_closed_started": _request_that("start", "close"),
    "wait_released_started": _request_that("start", "release"),
    "check_vhdd_sum": lambda group: group.check_algorithm("vhdd"),
    "check_xring_adasum": lambda group: group.check_algorithm("xring#2", Adasum),
    "order_list": _reduced(lambda: ones(4), order="list"),
    "order_number": _reduced(lambda: ones(4), order=1),
    "order_max": _reduced(lambda: ones(4), Max, order="tree"),
    "order_xring": _reduced(lambda: ones(4), order="tree", algorithm="xring"),
    "order_collective": _reduced(lambda: ones(4), order="tree", algorithm="collective"),
    "order_accumulate": _reduced(
        lambda: ones(4), order="tree", accumulate=torch.float32, algorithm="rd"
    ),
    "accumulate_alone": _reduced(lambda: ones(4), accumulate=torch.float32),
    "accumulate_half": _reduced(lambda: ones(4), order="tree", accumulate=torch.bfloat16),
    "accumulate_double": _reduced(
        lambda: ones(4, dtype=F64), order="tree", accumulate=torch.float32
    ),
    "scatter_out_wide": lambda group: group.reduce_scatter(
        ones(2 * group.size, dtype=torch.bfloat16), out=ones(2)
    ),
    "scatter_out_double": lambda group: group.reduce_scatter(
        ones(2 * group.size), out=ones(2, dtype=F64), order="tree"
    ),
    "check_op": lambda group: group.check_algorithm("rd", "Sum"),  # type: ignore[arg-type]
    "abort_reason": lambda group: group.abort(7),  # type: ignore[arg-type]
    "init_differs": lambda group: collectives.init(transport="carrier pigeon"),
    "split_bounds": lambda group: collectives.split_bounds(-1, 2),
    "size_word": lambda group: collectives.parse_general_int("1.5k"),
}


# By functions of the default group, which only ranks as threads have here.
OF_DEFAULT_GROUP: dict[str, Call] = {
    "inference_inside": _inside_inference_mode,
    "gather_conjugate": lambda group: adasum.allgather(
        ones(3, dtype=torch.complex64).mul(1j).conj()
    ),
    "hvd_compression": lambda group: adasum.allreduce(ones(2), compression=None),
    "hvd_average": lambda group: adasum.allreduce(ones(2), average=ones(2)),
    "hvd_root": lambda group: adasum.broadcast(ones(2), "0"),
    "hvd_name": lambda group: adasum.broadcast_object(1, name=3),
    "hvd_prescale": lambda group: adasum.reducescatter(ones(2), prescale_factor="2"),
    "hvd_join": lambda group: adasum.join(device="cuda"),
    "hvd_grouped": lambda group: adasum.grouped_allreduce(ones(2)),
    "hvd_scalar": lambda group: adasum.allgather(torch.tensor(1.0, requires_grad=True)),
}


def _plain(function: Callable[..., Any], *args: Any, **options: Any) -> Call:
    """A function that needs no ranks."""
    return lambda group: function(*args, **options)


_nodes = collectives.Topology(4, 2)
WITHOUT_RANKS: dict[str, Call] = {
    "rings_shards": _plain(collectives.ring_permutations, 1, 3, [0, 1]),
    "rings_negative": _plain(collectives.ring_permutations, 1, -1, [0]),
    "rings_no_node": _plain(collectives.ring_permutations, 0, 1, [0]),
    "rings_order": _plain(collectives.ring_permutations, 1, 1, [1, 2]),
    "rings_twice": _plain(collectives.ring_permutations, 1, 1, [0, 0]),
    "rings_member": _plain(collectives.ring_permutations, 1, 1, [-1]),
    "rings_text": _plain(collectives.ring_permutations, 1, 1, ["a"]),
    "rings_float": _plain(collectives.ring_permutations, 1.0, 1, [0]),
    "rings_bool": _plain(collectives.ring_permutations, 1, True, [0]),
    "topology_size": _plain(collectives.Topology, 0, 1),
    "topology_local": _plain(collectives.Topology, 4, 0),
    "topology_divides": _plain(collectives.Topology, 6, 4),
    "topology_float": _plain(collectives.Topology, 4, 2.0),
    "topology_order": _plain(collectives.Topology, 4, 2, (0, 2)),
    "topology_short": _plain(collectives.Topology, 4, 2, (0,)),
    "topology_rank": _plain(_nodes.node_of, 4),
    "topology_local_rank": _plain(_nodes.local_rank_of, -1),
    "topology_node": _plain(_nodes.ranks_of, 2),
    "hook_state": _plain(adasum.ddp_hook, None, None),
    "handle_none": _plain(adasum.synchronize, None),
    "process_set_tensor": _plain(adasum.ProcessSet, torch.tensor([0, 1])),
    "process_set_text": _plain(adasum.process_set_by_id, "0"),
    "buffer_none": _plain(collectives.FusedBuffer, []),
    "verify_none": _plain(collectives.verify, None),
    "sizes_entry": _plain(collectives.split_by_size, [3], 1),
    "groups_entry": _plain(collectives.plan_groups, [None]),
    "devices_dict": _plain(collectives.group_devices, {"a": 1}, 1),
    "split_float": _plain(collectives.split_bounds, 1.5, 2),
    "packing_contradicts": _plain(
        collectives.unpack_small_tensors,
        [ones(7)] * 4,
        collectives.Packing(((2, 2), (2, 2)), (torch.Size([7]),) * 4),
    ),
    "ranges_descend": _plain(collectives.extract_ranges, [2, 1]),
    "ranges_equal": _plain(collectives.extract_ranges, [1, 2, 2]),
    "ranges_limit": _plain(collectives.extract_ranges, [1], 0),
    "devices_none": _plain(collectives.group_devices, [0, 1, 2], 0),
    "devices_many": _plain(collectives.group_devices, [0, 1, 2], 4),
    "groups_memory": _plain(collectives.plan_groups, [], memory_size=0),
    "groups_size": _plain(collectives.plan_groups, [], groups_size=0),
    "pack_bytes": _plain(collectives.pack_small_tensors, [], -1),
    "split_pieces": _plain(collectives.split_bounds, 4, 0),
    "order_of_ring": _plain(collectives.order_of, "xring", 4),
    "order_of_ranges": _plain(collectives.order_of, "rd:4:rechd", 4),
    "order_of_auto": _plain(collectives.order_of, "auto", 4),
    "order_of_nodes": _plain(collectives.order_of, "rd", 4, nodes=3),
    "order_of_nccl": _plain(collectives.order_of, "nccl", 4),
    "schedule_auto": _plain(collectives.schedule, "auto", 4),
    "schedule_ranges": _plain(collectives.schedule, "rd:1:xring", 4, device="cpu"),
    "schedule_device": _plain(collectives.schedule, "auto", 4, nbytes=4),
    "schedule_nbytes": _plain(collectives.schedule, "rd", 4, nbytes=-1),
    "schedule_nccl": _plain(collectives.schedule, "nccl", 4),
    "schedule_collective": _plain(collectives.schedule, "collective/rd", 4),
    "schedule_shards": _plain(collectives.schedule, "xring#5", 4),
    "schedule_nodes": _plain(collectives.schedule, "rd", 4, 3),
    "schedule_size": _plain(collectives.schedule, "rd", 0),
    "schedule_op": _plain(collectives.schedule, "rd", 4, op="max"),
    "schedule_name": _plain(collectives.schedule, "rdd", 4),
}

SPECIFICATIONS: dict[str, Call] = {
    f"spec_{i}": _spec(text)
    for i, text in enumerate(
        (
            *(
                "bogus",
                "",
                ":",
                "xring:",
                "pscpu:32k",
                "pscpu:foo:xring",
                "xring:64k:nccl:2k:pscpu",
            ),
            *(
                "xring:-1:nccl",
                "xring#x",
                "xring#0",
                "xring#-3",
                "xring#2#3",
                "xring#99",
                "psgpu#99",
            ),
            *("rechd/", "/rechd", "a/b", "rechd/rd/rd", "vhdd/rechd", "bruck/rd", "rd/bruck"),
            *("auto#2", "auto/rd", "rd/auto", "nccl", "nccl/xring", "collective/nccl", " rd", "RD"),
            *("rd:1_000:rechd", "rd:1g:rechd", "rd:10:vhdd", "xring#99/rd", "rechd/xring#99"),
            *("pscpu::xring", "pscpu:9999999999999999999:xring", "xring:2k:", "/", "xring#"),
            *("xring#2k", "xring#٣", "xring#0/rd", "xring:2k:nccl:2k:pscpu", "xring:0:nccl"),
        )
    )
}
SPECIFICATIONS |= {
    "spec_number": _spec(7),
    "spec_bytes": _spec(b"rd"),
    "spec_xring_adasum": _spec("xring#2", Adasum),
    "spec_rechd_adasum": _spec("rechd", Adasum),
    "spec_collective_adasum": _spec("collective", Adasum),
    "spec_psgpu_adasum": _spec("psgpu#2", Adasum),
    "spec_inner_adasum": _spec("vhdd/vhdd", Adasum),
    "spec_outer_adasum": _spec("rechd/xring#2", Adasum),
    "spec_vhdd_max": _spec("vhdd", Max),
    "spec_average_levels": _spec("rechd/vhdd", Average),
    "spec_limited_adasum": _spec("rd:2:rechd", Adasum),
    "spec_collective": _spec("collective"),
    "spec_collective_doubled": _spec("collective", _Doubled()),
    "spec_levels_doubled": _spec("xring/rechd", _Doubled()),
    "spec_many_shards": _spec("rd#1099511627776"),
    "spec_range_not_taken": _spec("rd:1k:xring#99"),
}


def _odd(usual: Call, odd: Call, who: int = -1) -> Call:
    """One rank, the last one unless given, makes another call than the others."""
    return lambda group: (odd if group.rank == who % group.size else usual)(group)


def _request(*args: Any, **options: Any) -> Call:
    def call(group: Group) -> Any:
        request = group.all_reduce_init(*args, **options)
        request.start()
        return request.wait()

    return call


PLAIN = _reduced(lambda: ones(4))


def _grouped(*tensors: Any, **options: Any) -> Call:
    return lambda group: group.grouped_all_reduce([t.clone() for t in tensors], **options)


def _two_requests(group: Group) -> Any:
    """Each rank starts another one first."""
    requests = [group.all_reduce_init(ones(4), name=name) for name in ("a", "b")]
    request = requests[group.rank % 2]
    request.start()
    return request.wait()


def _joined_root(group: Group) -> Any:
    return group.join() if group.rank == 0 else group.broadcast(ones(4), 0)


def _after_a_mismatch(group: Group) -> Any:
    """The group stays usable, and the tensor is as it was."""
    x = ones(4 + group.rank)
    try:
        group.all_reduce(x)
    except collectives.CollectiveMismatchError as error:
        group.barrier()
        return f"{x.sum().item()} after {str(error)[:14]}"


MISMATCHES: dict[str, Call] = {
    "shape": lambda group: group.all_reduce(ones(4 + group.rank % 2)),
    "dimensions": _odd(PLAIN, _reduced(lambda: ones(2, 2))),
    "dtype": _odd(PLAIN, _reduced(lambda: ones(4, dtype=F64)), 0),
    "op": _odd(PLAIN, _reduced(lambda: ones(4), Average)),
    "weights": _odd(_reduced(lambda: ones(4), Adasum), _reduced(lambda: ones(4), UNWEIGHTED)),
    "prescale": _odd(PLAIN, _reduced(lambda: ones(4), prescale=0.5), 0),
    "postscale": _odd(PLAIN, _reduced(lambda: ones(4), postscale=2)),
    "algorithm": _odd(PLAIN, _reduced(lambda: ones(4), algorithm="rechd")),
    "order": _odd(PLAIN, _reduced(lambda: ones(4), order="tree")),
    "limit": _odd(_spec("rd:8:rechd"), _spec("rd:9:rechd")),
    "segments": _odd(PLAIN, _reduced(lambda: ones(4), segments=(0, 2, 4))),
    "name": lambda group: group.all_reduce(ones(4), name=f"loss {group.rank}"),
    "name_and_none": _odd(PLAIN, _reduced(lambda: ones(4), name="loss")),
    "name_empty": _odd(PLAIN, _reduced(lambda: ones(4), name="")),
    "kind": _odd(PLAIN, lambda group: group.broadcast(ones(4))),
    "kinds": lambda group: (
        group.barrier(),
        group.barrier("second") if group.rank else group.all_gather(ones(2)),
    ),
    "root": lambda group: group.broadcast(ones(4), group.rank),
    "dst": lambda group: group.reduce(ones(4), group.rank),
    "count": _odd(_grouped(ones(2)), _grouped(ones(2), ones(3), name="all")),
    "count_alone": _odd(_grouped(ones(2)), _grouped(ones(2), ones(3))),
    "count_of_none": _odd(_grouped(ones(2)), _grouped(), 0),
    "entry": _odd(_grouped(ones(2), ones(3)), _grouped(ones(2), ones(4))),
    "entry_dtype": _odd(_grouped(ones(2), ones(3)), _grouped(ones(2), ones(3, dtype=F64)), 0),
    "named_entry": _odd(
        _grouped(ones(2), ones(3), names=["a", "b"]), _grouped(ones(2), ones(4), names=["a", "b"])
    ),
    "entry_names": _odd(
        _grouped(ones(2), ones(3), names=["a", "b"]), _grouped(ones(2), ones(3), names=["a", "c"])
    ),
    "packed": _odd(_grouped(ones(2)), _grouped(ones(2), packed=True)),
    "owners": lambda group: group.reduce_to_owners([ones(4)], owners=[group.rank]),
    "from_owners": lambda group: group.broadcast_from_owners([ones(4)], owners=[group.rank]),
    "by_rows": lambda group: group.reduce_scatter(ones(4), by_rows=group.rank == 0),
    "scatter_shape": lambda group: group.reduce_scatter(ones(4 + group.rank)),
    "gather_rest": lambda group: group.all_gather(ones(2, 2 + group.rank)),
    "gather_dtype": _odd(
        lambda group: group.all_gather(ones(2)),
        lambda group: group.all_gather(ones(2, dtype=torch.float16)),
    ),
    "gather_out_rows": lambda group: group.all_gather(
        ones(2), out=ones(2 * group.size + group.rank)
    ),
    "to_all_rest": lambda group: group.all_to_all(ones(group.size, 2 + group.rank)),
    "split": lambda group: group.split([group.rank]),
    "schedule": lambda group: group.run(line(group.size) if group.rank else _ring(group), ones(4)),
    "request": lambda group: group.all_reduce_init(ones(4 + group.rank)),
    "request_and_call": _odd(PLAIN, _request(ones(4))),
    "requests": _two_requests,
    "unnegotiated": lambda group: _request(ones(4 + group.rank), negotiate=False)(group),
    "async": lambda group: group.all_reduce(ones(4 + group.rank), async_op=True).wait(),
    "joined_root": _joined_root,
    "afterwards": _after_a_mismatch,
}


def _after(last: Callable[[Group], Any], first: Call) -> Call:
    """What a later call is answered."""

    def call(group: Group) -> Any:
        first(group)
        return last(group)

    return call


ENDS: dict[str, Call] = {
    "ends_closed": _after(PLAIN, lambda group: (group.barrier(), group.close())),
    "ends_closed_async": _after(
        lambda group: group.all_reduce(ones(4), async_op=True).wait(),
        lambda group: (group.barrier(), group.close()),
    ),
    "ends_closed_request": _after(
        lambda group: group.all_reduce_init(ones(4)),
        lambda group: (group.barrier(), group.close()),
    ),
}


ERRORS: dict[str, Call] = (
    REFUSED | OF_DEFAULT_GROUP | WITHOUT_RANKS | SPECIFICATIONS | MISMATCHES | ENDS
)
