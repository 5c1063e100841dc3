"""Device functions with which the programs of a node's GPUs wait for each other.

Protocol: program p of each rank has a row of counters in that rank's signal pad, one for each peer,
which program p of that peer alone writes. A store releases, and reading acquires, in the scope of
the system: what a program has stored or read before it signals comes before what its peers do after
their wait. Counters only rise, so that none is ever reset: before a launch all counters of row p
are `turn`, which the program keeps in memory of its own GPU.

Programs of one launch wait for each other at a barrier, a counter in the memory of their own GPU.

Every wait is bounded. A program whose peers do not come writes to an error word which of them it
misses, and ends; so does each that finds that word set, as all later launches do. The first one
tells the host as well, by a word in the host's memory, which is not written otherwise. A host that
writes there ends what waits.
"""

from __future__ import annotations

from kernels.gpu.launcher import jit, tl, triton

# Programs of a launch at most; rows of a pad.
MAX_PROGRAMS = 64
PROGRAMS = MAX_PROGRAMS if triton is None else tl.constexpr(MAX_PROGRAMS)
# Of a pad, behind the counters: two small matrices from each of 8 ranks.
MAILBOX_BYTES = 16384
_MAILBOXES = MAILBOX_BYTES if triton is None else tl.constexpr(MAILBOX_BYTES)
# Of the memory of a rank's own: each program's turn, its clock, the error word, the barrier's
# counter, and the address of the host's word.
STATE_WORDS = 2 * MAX_PROGRAMS + 3


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
def _store_release(at, value):
    """Store int64 at an address, after all that this program has done: Triton's own orders nothing.

    Several threads may store the same.
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
def signal(pads, rank, n, count, SIZE: tl.constexpr):
    """Tell this program's peers, itself among them, that it has signalled `count` times by now."""
    # Those behind the last rank do as it does: each counter gets one value, whoever stores it.
    q = tl.minimum(tl.arange(0, SIZE), n - 1)
    mine = tl.program_id(0).to(tl.int64) * n + rank
    at = tl.load(pads + q) + 8 * mine
    tl.debug_barrier()
    _store_release(at, tl.zeros([SIZE], tl.int64) + count)


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
def _host_word(state):
    """Address of the host's word, and what it says."""
    at = tl.load(state + 2 * PROGRAMS + 2)
    return at, tl.atomic_add(at.to(tl.pointer_type(tl.int64)), 0, sem="acquire", scope="sys")


@jit
def _ended(state):
    """Whether a program of this GPU has waited in vain, or the host has given up."""
    _, said = _host_word(state)
    return (said | tl.atomic_add(state + 2 * PROGRAMS, 0, sem="acquire")) != 0


@jit
def _fail(state, error):
    """Write an error, of which the largest is kept; the first one to the host as well."""
    at, said = _host_word(state)
    before = tl.atomic_max(state + 2 * PROGRAMS, error, sem="release")
    if (before | said) == 0:
        _store_release(at, error)


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
            waited = tl.where(_ended(state), limit, now - begun)
    if missing != 0:
        _fail(state, (tl.full([], PHASE, tl.int64) << 32) | missing)
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
            waited = tl.where(_ended(state), limit, now - begun)
    if missing:
        # Below the error of a program that misses a peer.
        _fail(state, tl.full([], 1, tl.int64) << rank)
    return missing == 0


@jit
def end_turn(state, turn):
    """Keep how often the peers have signalled now, for the next launch."""
    tl.store(state + tl.program_id(0), turn)
