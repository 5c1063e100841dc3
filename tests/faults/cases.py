"""What happens, to whom, where, and what the others are promised."""

from __future__ import annotations

from dataclasses import dataclass

# Of any wait for a peer, in seconds, unless a case has its own.
TIMEOUT = 4.0
# The others are promised their error within the timeout plus this.
GRACE = 5.0
# From the error to the process's end. An interpreter that has imported torch needs a second of CPU
# time for its exit, and twelve ranks share two cores; what hangs does so for ever.
EXIT = 12.0
LAST = 2

_GONE = ("CollectiveTimeoutError",)
_BROKEN = ("CollectiveTimeoutError", "TransportError")


@dataclass(frozen=True)
class Case:
    """One fault among three ranks.

    Attributes:
        use: What the ranks do, as `job._trainer` takes it.
        where: The moment of the fault.
        what: The fault, as `job._strike` takes it.
        transport: What CPU tensors travel by.
        victim: The rank at fault; -1 for none.
        timeout: The group's, in seconds.
        late: Seconds that a late rank is late.
        errors: What each of the others may get; none for no error, and status 0.
        store: Who holds the store: rank 0, or an agent, as with torchrun.
        size: How many ranks there are.
    """

    use: str
    where: str
    what: str
    transport: str = "shm"
    victim: int = LAST
    timeout: float = TIMEOUT
    late: float = 0.0
    errors: tuple[str, ...] = _GONE
    store: str = "rank 0"
    size: int = 3

    def __str__(self) -> str:
        parts = [self.use, self.where, self.what, self.transport]
        if self.victim != LAST:
            parts.append(f"rank {self.victim}" if self.victim >= 0 else "no rank")
        if self.timeout != TIMEOUT:
            parts.append(f"timeout {self.timeout:g}")
        return "-".join(parts).replace(" ", "_")

    @property
    def victim_status(self) -> int:
        """The exit status of the rank at fault, which nothing but the fault itself decides."""
        killed = {"kill": -9, "stop": -9, "sys.exit": 3, "os._exit": 0}
        # Late ranks, and those stopped and continued, find that the others have gone.
        return killed.get(self.what, 1 if self.errors or self.what == "raise" else 0)


CASES = [
    # Plain collectives: the moment before a call.
    *(Case("all_reduce", "call", what, transport)
      for transport in ("shm", "gloo")
      for what in ("kill", "stop", "stop and go on", "sys.exit", "os._exit", "raise")),
    # The rank that holds the store.
    Case("all_reduce", "call", "kill", "shm", victim=0),
    Case("all_reduce", "call", "kill", "gloo", victim=0),
    # While a request is under way.
    Case("request", "call", "kill", "shm"),
    Case("request", "call", "kill", "gloo"),
    # In the middle of messages.
    *(Case("all_reduce", "transfer", what, transport)
      for transport in ("shm", "gloo") for what in ("kill", "stop", "os._exit")),
    # Late.
    Case("all_reduce", "call", "late", "shm", late=10.0),
    Case("all_reduce", "call", "late", "gloo", late=10.0),
    Case("all_reduce", "call", "late", "shm", late=10.0, timeout=30.0, errors=()),
    Case("average", "backward", "late", "gloo", late=10.0, timeout=30.0, errors=()),
    # Training.
    Case("average", "backward", "kill", "gloo"),
    Case("average", "backward", "raise", "shm"),
    Case("average", "step", "stop", "shm"),
    Case("delta", "backward", "raise", "gloo"),
    Case("delta", "step", "kill", "shm"),
    Case("delta", "step", "late", "gloo", late=10.0),
    Case("delta", "step", "sys.exit", "gloo"),
    Case("delta", "missing step", "skip", "shm", errors=("CollectiveMismatchError",)),
    Case("gradient", "backward", "os._exit", "shm"),
    Case("gradient", "backward", "stop", "gloo"),
    Case("gradient", "step", "raise", "gloo"),
    Case("in_backward", "backward", "kill", "shm"),
    Case("in_backward", "backward", "raise", "gloo"),
    Case("ddp", "backward", "kill", "shm"),
    Case("ddp", "backward", "raise", "gloo"),
    Case("ddp", "backward", "stop", "gloo"),
    Case("ddp", "step", "sys.exit", "shm"),
    # Start-up.
    Case("all_reduce", "before init", "kill", "gloo"),
    Case("all_reduce", "before init", "kill", "gloo", victim=0),
    Case("all_reduce", "before init", "late", "shm", late=10.0),
    Case("all_reduce", "connecting", "kill", "gloo"),
    Case("all_reduce", "connecting", "stop", "shm", victim=0),
    Case("all_reduce", "port taken", "", "gloo", victim=-1, errors=_BROKEN),
    # On a GPU, where a context takes seconds to make.
    *(Case("all_reduce", where, what, "nccl", timeout=20.0)
      for where, what in (
          ("call", "kill"), ("call", "stop"), ("call", "sys.exit"), ("call", "raise"),
          ("transfer", "kill"), ("transfer", "stop"))),
    Case("average", "backward", "kill", "nccl", timeout=20.0),
    Case("delta", "step", "raise", "nccl", timeout=20.0),
    Case("ddp", "backward", "stop", "nccl", timeout=20.0),
    # Shut-down.
    *(Case("all_reduce", "shutdown", what, transport, victim=victim, errors=())
      for transport, what, victim in (
          ("shm", "kill", 0), ("gloo", "kill", 0), ("gloo", "stop", LAST), ("shm", "stop", LAST))),
    Case("all_reduce", "unwaited", "kill", "shm", errors=()),
    Case("all_reduce", "unwaited", "stop", "gloo", errors=()),
    # The store of an agent.
    Case("split", "store gone", "", "gloo", victim=-1, errors=_BROKEN, store="agent"),
    Case("split", "store gone", "", "shm", victim=-1, errors=_BROKEN, store="agent"),
]  # fmt: skip

# One of each kind, of those that wait least; the others are slow.
QUICK = frozenset({
    "all_reduce-call-kill-shm",
    "all_reduce-call-stop-gloo",
    "all_reduce-call-kill-gloo",
    "all_reduce-transfer-os._exit-shm",
    "request-call-kill-gloo",
    "average-backward-kill-gloo",
    "delta-missing_step-skip-shm",
    "delta-step-kill-shm",
    "ddp-backward-raise-gloo",
    "all_reduce-before_init-kill-gloo",
    "all_reduce-connecting-kill-gloo",
    "all_reduce-shutdown-kill-gloo-rank_0",
    "all_reduce-unwaited-kill-shm",
    "split-store_gone--shm-no_rank",
})  # fmt: skip
