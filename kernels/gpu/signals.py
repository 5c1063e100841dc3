"""Device functions that let the programs of a node's GPUs wait for each other.

Protocol: program p of each rank has counters in that rank's signal pad, row p, one for each peer.
Only program p of that peer writes to its counter. Stores release and reads acquire, in the scope of
the system: a program's accesses before its signal precede its peers' accesses after their wait.
Counters only rise and are never reset: before a launch all counters of row p equal `turn`, which
the program keeps in memory of its own GPU.

Programs of one launch wait for each other at a barrier, a counter in the memory of their own GPU.

Every wait is bounded. If a program's peers do not signal in time, it writes the missing ones to an
error word, and ends. Every program that finds the error word set ends, too, in later launches as
well. The first error is also written to a word in the host's memory, which programs do not write
otherwise. If the host writes to that word, all waits end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kernels.gpu.launcher import jit, tl, triton
from kernels.gpu.tiles import THREADS

# Maximum number of programs of a launch, and number of rows of a pad.
MAX_PROGRAMS = 64
PROGRAMS = MAX_PROGRAMS if triton is None else tl.constexpr(MAX_PROGRAMS)
# Bytes of a pad's mailboxes, behind the counters: two small matrices from each of 8 ranks.
MAILBOX_BYTES = 16384
_MAILBOXES = MAILBOX_BYTES if triton is None else tl.constexpr(MAILBOX_BYTES)
# Words in a rank's own memory: each program's turn, each program's clock, the error word, the
# barrier's counter, and the address of the host's word.
STATE_WORDS = 2 * MAX_PROGRAMS + 3


class Peers(NamedTuple):
    """The arguments of a kernel that its waits need.

    Attributes:
        pads: The addresses of all ranks' pads.
        state: STATE_WORDS in this GPU's memory.
        limit: Maximum nanoseconds of a wait.
        rank: This rank.
        n: Number of ranks.
    """

    pads: Any
    state: Any
    limit: Any
    rank: Any
    n: Any


@jit
def mailboxes_at(n):
    """Offset of a pad's mailboxes, behind the counters: aligned, since their number is even."""
    return PROGRAMS * n * 8


@jit
def places_at(n):
    """Offset of a pad's places of programs, behind the mailboxes."""
    return mailboxes_at(n) + _MAILBOXES


@jit
def turn_of(state):
    """How often each peer has signalled this program in earlier launches; -1 after an error."""
    failed = tl.atomic_add(state + 2 * PROGRAMS, 0, sem="acquire") != 0
    return tl.where(failed, -1, tl.load(state + tl.program_id(0)))


@jit
def _store_release(at, value):
    """Store int64 at an address after this program's earlier accesses, which tl.store does not.

    Several threads may store the same value.
    """
    tl.inline_asm_elementwise(
        "st.release.sys.global.b64 [$1], $2;\nmov.b32 $0, 0;",
        "=r,l,l",
        [at, value],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def _signal(peers, count, SIZE: tl.constexpr):
    """Set this program's counters at all peers, itself included, to `count` signals so far."""
    # Elements beyond the last rank repeat its store: several stores of one value to a counter.
    q = tl.minimum(tl.arange(0, SIZE), peers.n - 1)
    mine = tl.program_id(0).to(tl.int64) * peers.n + peers.rank
    at = tl.load(peers.pads + q) + 8 * mine
    tl.debug_barrier()
    _store_release(at, tl.zeros([SIZE], tl.int64) + count)


@jit
def _load_acquire(at):
    """Load int64 from addresses before this program's later accesses, which tl.load does not."""
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.b64 $0, [$1];",
        "=l,l",
        [at],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@jit
def _late_peers(row, turn, n):
    """The peers whose counters in `row` are not above `turn`, as bits.

    There is an element for each thread, so that the sum is made in shared memory and all threads
    get the same one. Of fewer elements each warp would load its own copy and make its own sum.
    """
    i = tl.arange(0, THREADS)
    q = tl.minimum(i, n - 1)
    bit = tl.full([THREADS], 1, tl.int64) << q
    return tl.sum(tl.where((i < n) & (_load_acquire(row + 8 * q) <= turn), bit, 0), axis=0)


@jit
def _own_bit_until_full(counter, before, rank):
    """This rank's bit while programs of this launch are missing at `grid_barrier`, then 0."""
    missing = tl.atomic_add(counter, 0, sem="acquire") >> 32 == before
    return missing.to(tl.int64) << rank


@jit
def _now(clock):
    """Time in nanoseconds, the same in all threads, since they read it from memory."""
    tl.atomic_max(clock, tl.extra.cuda.globaltimer(), sem="relaxed")
    return tl.atomic_add(clock, 0, sem="relaxed")


@jit
def _host_word(state):
    """The address of the host's word, and its value."""
    at = tl.load(state + 2 * PROGRAMS + 2)
    return at, tl.atomic_add(at.to(tl.pointer_type(tl.int64)), 0, sem="acquire", scope="sys")


@jit
def _ended(state):
    """Whether a program of this GPU has timed out, or the host has given up."""
    _, said = _host_word(state)
    return (said | tl.atomic_add(state + 2 * PROGRAMS, 0, sem="acquire")) != 0


@jit
def _fail(state, error):
    """Write an error; the largest error is kept, and the first is written to the host, too."""
    at, said = _host_word(state)
    before = tl.atomic_max(state + 2 * PROGRAMS, error, sem="release")
    if (before | said) == 0:
        _store_release(at, error)


@jit
def _wait(
    MISSING: tl.constexpr, at, before, number, peers, PHASE: tl.constexpr, SPINS: tl.constexpr
):
    """Wait until MISSING(at, before, number) is 0; return whether it is.

    After the limit, PHASE and the missing ranks are written to the error word. The wait also ends
    if another program has set the word or the host has given up. The clock and the words are
    checked once in SPINS checks of the counters: another program may have ended without its peer.
    """
    missing = MISSING(at, before, number)
    begun = tl.full([], -1, tl.int64)
    waited = tl.full([], 0, tl.int64)
    while (missing != 0) & (waited < peers.limit):
        spins = tl.full([], 0, tl.int32)
        while (missing != 0) & (spins < SPINS):
            missing = MISSING(at, before, number)
            spins += 1
        if missing != 0:
            now = _now(peers.state + PROGRAMS + tl.program_id(0))
            begun = tl.where(begun < 0, now, begun)
            waited = tl.where(_ended(peers.state), peers.limit, now - begun)
    if missing != 0:
        _fail(peers.state, (tl.full([], PHASE, tl.int64) << 32) | missing)
    return missing == 0


@jit
def rank_barrier(peers, turn, PHASE: tl.constexpr, SIZE: tl.constexpr, SPINS: tl.constexpr):
    """Wait until this program of all ranks has arrived here; return whether it has.

    turn: Each peer's number of signals so far. PHASE: What a missing rank has not done, in errors.
    """
    _signal(peers, turn + 1, SIZE)
    program = tl.program_id(0).to(tl.int64)
    row = tl.load(peers.pads + peers.rank) + 8 * program * peers.n
    return _wait(_late_peers, row, turn, peers.n, peers, PHASE, SPINS)


@jit
def grid_barrier(peers, SPINS: tl.constexpr):
    """Wait until all programs of this launch have arrived here; return whether they have.

    Afterwards all programs may read what each has stored before. All programs together add 2**32 to
    the counter, whatever their number, so its upper half changes when the last one arrives.
    """
    counter = peers.state + 2 * PROGRAMS + 1
    others = tl.num_programs(0).to(tl.int64) - 1
    share = tl.where(tl.program_id(0) == 0, (1 << 32) - others, 1)
    tl.debug_barrier()
    before = tl.atomic_add(counter, share, sem="release") >> 32
    # Phase 0: this error is smaller than that of a program that misses a peer.
    return _wait(_own_bit_until_full, counter, before, peers.rank, peers, 0, SPINS)


@jit
def end_turn(state, turn):
    """Store the number of the peers' signals so far, for the next launch."""
    tl.store(state + tl.program_id(0), turn)
