"""What each rank does in the tests of collectives. Results come back on the host."""

import collections
import dataclasses
import datetime
import os
import random

import torch

from anydevice.collectives import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from anydevice.errors import CollectiveMismatchError
from anydevice.processes import PartialState
from anydevice.tensors import send_to_device

Pair = collections.namedtuple("Pair", ["left", "right"])
LIMIT = datetime.timedelta(seconds=20)
DTYPES = [
    *("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"),
    *("bool", "complex64", "float8_e4m3fn"),
]


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    extra: object = None


class Batch(dict):
    """A mapping that keeps more than its items, as a tokenizer's does."""

    def __init__(self, *args, name="", **kwargs):
        super().__init__(*args, **kwargs)
        self.name = name


def nested(rank, device="cpu"):
    """One of everything, different on each rank."""
    batch = Batch({"ids": torch.arange(3) + 10 * rank}, name=f"of {rank}")
    batch["mask"] = torch.tensor([True, rank == 0, False])
    data = {
        "tensor": torch.full((2, 3), float(rank)),
        "scalar": torch.tensor(float(rank)),
        "list": [torch.tensor([rank], dtype=torch.int32), (torch.ones(1, 2) * rank, None)],
        "pair": Pair(torch.tensor([rank]), torch.tensor([-rank])),
        "output": Output(torch.tensor([rank + 0.5]), {"more": torch.zeros(0, 4)}),
        "batch": batch,
        "turned": (torch.arange(6.0).reshape(2, 3) + rank).t(),
        "trained": torch.full((2,), float(rank), requires_grad=True),
    }
    return send_to_device(data, device)


def values(rank, dtype, device):
    """Five numbers of a dtype."""
    return (torch.tensor([0, 1, 2, 3, 1]) * (rank + 1) % 5).to(getattr(torch, dtype)).to(device)


def host(data):
    return send_to_device(data, "cpu")


def tour(rank, size):
    """Every collective, on everything."""
    state = PartialState()
    device = state.device
    found = {"devices": set()}
    data = nested(rank, device)
    gathered = gather(data)
    found["devices"].add(gathered["tensor"].device.type)
    found["nested"] = host(gathered)
    found["not nested"] = host(gather(torch.tensor([rank], device=device)))
    found["host tensor"] = gather(torch.tensor([rank]))
    found["nothing"] = host(gather({"a": [], "b": None}))
    for dtype in DTYPES:
        mine = values(rank, dtype, device)
        found[f"gather {dtype}"] = host(gather(mine))
        found[f"broadcast {dtype}"] = host(broadcast(mine.clone(), from_process=size - 1))
        found[f"sum {dtype}"] = host(reduce(mine, "sum"))
        found[f"mean {dtype}"] = host(reduce(mine, "mean"))
        if dtype != "complex64":
            found[f"max {dtype}"] = host(reduce(mine, "max"))
    found["none"] = host(reduce(values(rank, "float32", device), "none"))
    found["scaled"] = host(reduce(torch.ones(2, device=device), "sum", scale=0.5))
    found["reduced"] = host(reduce(nested(rank, device), "sum"))
    own = nested(rank, device)
    received = broadcast(own, from_process=1)
    found["broadcast is in place"] = received is own
    found["broadcast"] = host(own)

    uneven = {
        "a": torch.full((rank + 1, 2), rank, device=device),
        "b": [torch.zeros(2, rank, dtype=torch.bool, device=device)],
    }
    padded = {}
    for name, options in {
        "first": {},
        "front": {"pad_first": True, "pad_index": 7},
        "second": {"dim": 1, "pad_index": 1},
        "last": {"dim": -1, "pad_index": 1},
        "fifth": {"dim": 5},
    }.items():
        padded[name] = host(pad_across_processes(uneven, **options))
    found["padded"] = padded
    longest = pad_across_processes(torch.arange(rank * 2, device=device), pad_index=-1)
    found["padded and gathered"] = host(gather(longest))

    found["objects"] = gather_object([("rank", rank), {"n": rank}])
    found["object"] = gather_object({"rank": rank})
    large = os.urandom(30_000) if rank % 2 else b"small"
    found["large"] = [len(item) for item in gather_object([large])]
    for count in (1, 50_000):
        objects = [rank, "x" * count * (rank + 1)]
        again = broadcast_object_list(objects, from_process=1)
        found[f"sent {count}"] = (objects[0], len(objects[1]), again is objects)
    return found


def sequences(rank, size, seed):
    """Calls of sizes that change from one to the next: each finds what was sent for it."""
    state = PartialState(timeout=LIMIT)
    chooser = random.Random(seed)  # the same on all ranks
    for _ in range(40):
        kind = chooser.choice(["gather", "gather", "gather", "objects", "wait", "sum", "different"])
        length = chooser.choice([0, 1, 7, 100, 100, 3 << 20])
        mine = torch.arange(length).remainder(251).to(torch.uint8) + rank
        if kind == "gather":
            expected = torch.cat([mine - rank + other for other in range(size)])
            assert torch.equal(gather({"a": mine})["a"], expected)
        elif kind == "objects":
            words = "x" * (length % 10_000) * rank
            assert gather_object([words]) == ["x" * (length % 10_000) * r for r in range(size)]
        elif kind == "sum":
            assert reduce(mine[:5].long(), "max").equal(mine[:5].long() - rank + size - 1)
        elif kind == "wait":
            state.wait_for_everyone()
        else:  # as many bytes, and another shape
            turned = mine.reshape((-1, 1) if rank else (1, -1)) if length > 1 else mine[rank:]
            lines = 0
            try:
                gather(turned)
            except CollectiveMismatchError as error:
                lines = str(error).count("ranks.py:")
            assert lines == (size if length else 0)
    return True


def comes_late(rank, size):
    """A rank that comes to its third call when the other has given up, and its fourth."""
    state = PartialState(timeout=LIMIT)
    store = torch.distributed.distributed_c10d._get_default_store()
    gather(torch.zeros(1))
    gather(torch.zeros(1))  # BOTH
    if rank == 0:
        exchange = state._exchange
        exchange._limit = exchange._meetings._limit = datetime.timedelta(seconds=1)
        try:
            gather(torch.zeros(1))  # WAITS TOO LONG
        finally:
            store.set("gave up", b"1")
    store.wait(["gave up"], LIMIT)
    gather(torch.zeros(1))  # what rank 0 sent is there
    state.wait_for_everyone()


def mismatches(rank, size):
    """What each rank is told where the ranks do not do the same."""
    state = PartialState(timeout=LIMIT)
    device = state.device
    odd = rank == 1
    cases = {
        "shape": lambda: gather(torch.zeros(3 if odd else 2, device=device)),
        "dtype": lambda: gather(torch.zeros(2, dtype=torch.int32 if odd else torch.int64)),
        "structure": lambda: reduce([torch.zeros(1)] if odd else {"a": torch.zeros(1)}),
        "keys": lambda: broadcast({"b" if odd else "a": torch.zeros(1)}),
        "call": lambda: gather(torch.zeros(1)) if odd else reduce(torch.zeros(1)),
        "root": lambda: broadcast(torch.zeros(1), from_process=int(odd)),
        "reduction": lambda: reduce(torch.zeros(1), "sum" if odd else "mean"),
        "list": lambda: gather_object([1] if odd else 1),
        "lengths": lambda: broadcast_object_list([1, 2] if odd else [1]),
        "dimensions": lambda: pad_across_processes(torch.zeros((1, 1) if odd else 1)),
    }
    told = {}
    for name, case in cases.items():
        try:
            case()
        except Exception as error:  # noqa: BLE001 - told to the test
            told[name] = (type(error).__name__, str(error))
    told["afterwards"] = gather(torch.tensor([rank])).tolist()
    return told


def only_main(rank, size):
    """A collective under `if is_main_process`."""
    state = PartialState(timeout=LIMIT)
    if state.is_main_process:
        gather(torch.zeros(1))  # ALONE
    state.wait_for_everyone()  # TOGETHER


def dies_in_between(rank, size):
    """A rank that dies after the others have begun to wait for it."""
    PartialState(timeout=LIMIT)
    gather(torch.zeros(1))
    if rank == 1:
        os.kill(os.getpid(), 9)
    gather(torch.zeros(1))  # WAITS
