"""Device functions with which the programs of a node's GPUs wait for each other.

Protocol: program p of each rank has a row of counters in that rank's signal pad, one for each peer,
to which program p of that peer adds one. An addition releases, and reading acquires, in the scope
of the system: what a program has stored or read before it signals comes before what its peers do
after their wait. Counters only rise, so that none is ever reset: before a launch all counters of
row p are `turn`, which the program keeps in memory of its own GPU.

Programs of one launch wait for each other at a barrier, a counter in the memory of their own GPU.

Every wait is bounded. A program whose peers do not come writes to an error word which of them it
misses, and ends; so does each that finds that word set, as all later launches do.
"""

from __future__ import annotations

from kernels.gpu.launcher import jit, tl, triton

# Programs of a launch at most; rows of a pad.
MAX_PROGRAMS = 64
PROGRAMS = MAX_PROGRAMS if triton is None else tl.constexpr(MAX_PROGRAMS)
# Of a pad, behind the counters: two small matrices from each of 8 ranks.
MAILBOX_BYTES = 16384
_MAILBOXES = MAILBOX_BYTES if triton is None else tl.constexpr(MAILBOX_BYTES)
# Of the memory of a rank's own: each program's turn, its clock, the error word, and the barrier's
# counter.
STATE_WORDS = 2 * MAX_PROGRAMS + 2
ERROR_WORD = 2 * MAX_PROGRAMS


@jit
def mailboxes_at(n):
    """Where in a pad the mailboxes begin: behind the counters, of which there is an even number."""
    return PROGRAMS * n * 8


@jit
def places_at(n):
    """Where in a pad the programs' places begin: behind the mailboxes."""
    return mailboxes_at(n) + _MAILBOXES


@jit
def turn_of(state):
    """How often each peer has signalled to this program in earlier launches; -1 after an error."""
    failed = tl.atomic_add(state + 2 * PROGRAMS, 0, sem="acquire") != 0
    return tl.where(failed, -1, tl.load(state + tl.program_id(0)))


@jit
def signal(pads, rank, n, SIZE: tl.constexpr):
    """Tell this program's peers, itself among them, that it has come here."""
    q = tl.arange(0, SIZE)
    there = q < n
    at = tl.load(pads + q, mask=there, other=0).to(tl.pointer_type(tl.int64))
    tl.debug_barrier()
    mine = tl.program_id(0).to(tl.int64) * n + rank
    tl.atomic_add(at + mine, tl.full([SIZE], 1, tl.int64), mask=there, sem="release", scope="sys")


@jit
def _missing(row, n, turn, SIZE: tl.constexpr):
    """The peers, as bits, whose counters in `row` are not above `turn`."""
    q = tl.arange(0, SIZE)
    none = tl.zeros([SIZE], tl.int64)
    seen = tl.atomic_add(row + q, none, mask=q < n, sem="acquire", scope="sys")
    bit = tl.full([SIZE], 1, tl.int64) << q
    return tl.sum(tl.where((q < n) & (seen <= turn), bit, 0), axis=0)


@jit
def _now(clock):
    """Nanoseconds, the same in all threads: they learn them from memory, not each by itself."""
    tl.atomic_max(clock, tl.extra.cuda.globaltimer(), sem="relaxed")
    return tl.atomic_add(clock, 0, sem="relaxed")


@jit
def wait(pads, state, rank, n, turn, limit, PHASE: tl.constexpr, SIZE: tl.constexpr,
         SPINS: tl.constexpr):  # fmt: skip
    """Wait until all peers have signalled more than `turn` times; return whether they have.

    After `limit` nanoseconds, looked at once in SPINS, the error word gets PHASE and the peers. A
    word that is set by then, by another program or by a host that gives up, ends the wait.
    """
    row = tl.load(pads + rank).to(tl.pointer_type(tl.int64)) + tl.program_id(0) * n
    missing = _missing(row, n, turn, SIZE)
    begun = tl.full([], -1, tl.int64)
    waited = tl.full([], 0, tl.int64)
    while (missing != 0) & (waited < limit):
        spins = tl.full([], 0, tl.int32)
        while (missing != 0) & (spins < SPINS):
            missing = _missing(row, n, turn, SIZE)
            spins += 1
        if missing != 0:
            now = _now(state + PROGRAMS + tl.program_id(0))
            begun = tl.where(begun < 0, now, begun)
            failed = tl.atomic_add(state + 2 * PROGRAMS, 0, sem="acquire") != 0
            waited = tl.where(failed, limit, now - begun)
    if missing != 0:
        error = (tl.full([], PHASE, tl.int64) << 32) | missing
        tl.atomic_max(state + 2 * PROGRAMS, error, sem="release")
    return missing == 0


@jit
def grid_barrier(state, rank, limit, SPINS: tl.constexpr):
    """Wait until all programs of this launch have come here; return whether they have.

    What each has stored before, all may read. Together they add 2**32 to the counter, whatever
    their number, so that its upper half is another one when the last has come. The error word is
    looked at as often as the clock: one of them may miss a peer, and have ended.
    """
    counter = state + 2 * PROGRAMS + 1
    others = tl.num_programs(0).to(tl.int64) - 1
    share = tl.where(tl.program_id(0) == 0, (1 << 32) - others, 1)
    tl.debug_barrier()
    before = tl.atomic_add(counter, share, sem="release") >> 32
    missing = tl.atomic_add(counter, 0, sem="acquire") >> 32 == before
    begun = tl.full([], -1, tl.int64)
    waited = tl.full([], 0, tl.int64)
    while missing & (waited < limit):
        spins = tl.full([], 0, tl.int32)
        while missing & (spins < SPINS):
            missing = tl.atomic_add(counter, 0, sem="acquire") >> 32 == before
            spins += 1
        if missing:
            now = _now(state + PROGRAMS + tl.program_id(0))
            begun = tl.where(begun < 0, now, begun)
            failed = tl.atomic_add(state + 2 * PROGRAMS, 0, sem="acquire") != 0
            waited = tl.where(failed, limit, now - begun)
    if missing:
        # Below the error of a program that misses a peer.
        tl.atomic_max(state + 2 * PROGRAMS, tl.full([], 1, tl.int64) << rank, sem="release")
    return missing == 0


@jit
def end_turn(state, turn):
    """Keep how often the peers have signalled now, for the next launch."""
    tl.store(state + tl.program_id(0), turn)
