"""What each rank does in the tests of processes."""

import contextlib
import datetime
import logging
import os
import time

import torch

from anydevice.errors import ProcessGroupError
from anydevice.logging import get_logger
from anydevice.processes import PartialState

LIMIT = datetime.timedelta(seconds=20)


def tour(rank, size):
    """Everything about a state that one rank sees."""
    before = dict(os.environ)
    state = PartialState()
    found = {
        "rank": state.process_index,
        "size": state.num_processes,
        "local": state.local_process_index,
        "device": str(state.device),
        "type": str(state.distributed_type),
        "backend": state.backend,
        "main": state.is_main_process,
        "local_main": state.is_local_main_process,
        "last": state.is_last_process,
        "same": PartialState().__dict__ is state.__dict__,
        "made": str(torch.ones(1, device=state.device.type).device),
        "environment_kept": dict(os.environ) == before,
    }
    shares = {}
    for name, data in DATA.items():
        for padding in (False, True):
            with state.split_between_processes(data, apply_padding=padding) as part:
                shares[f"{name} {padding}"] = part
    found["shares"] = shares
    found["ran"] = {
        "main": state.on_main_process(lambda: rank)(),
        "local": state.on_local_main_process(lambda: rank)(),
        "last": state.on_last_process(lambda: rank)(),
        "one": state.on_process(process_index=1)(lambda: rank)(),
        "local_one": state.on_local_process(lambda: rank, local_process_index=1)(),
    }
    state.wait_for_everyone()
    return found


DATA = {
    "list": list(range(7)),
    "tuple": ("a", "b", "c"),
    "one": [5],
    "none": [],
    "tensor": torch.arange(10).reshape(5, 2),
    "dict": {"ids": torch.arange(3), "words": ["x", "y", "z"]},
}


def first(rank, size, path):
    """The order of lines that ranks write in main_process_first."""
    state = PartialState()
    here, everywhere = state.local_main_process_first, state.main_process_first
    for kinds in ((everywhere,), (here,), (everywhere, here), (here, everywhere)):
        with contextlib.ExitStack() as stack:
            for kind in kinds:
                stack.enter_context(kind())
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{rank}\n")
        state.wait_for_everyone()
    try:
        with state.main_process_first():
            if rank == 0:
                raise ValueError("the body failed")
    except ValueError:
        pass
    state.wait_for_everyone()
    return True


def leaves_early(rank, size):
    """Rank 1 ends; the others wait for it."""
    state = PartialState(timeout=LIMIT)
    state.wait_for_everyone()
    if rank == 1:
        return "left"
    state.wait_for_everyone()  # WAITS
    return "never"


def dies(rank, size):
    """Rank 1 is killed."""
    state = PartialState(timeout=LIMIT)
    state.wait_for_everyone()
    if rank == 1:
        os.kill(os.getpid(), 9)
    state.wait_for_everyone()  # WAITS
    return "never"


def makes_another_call(rank, size):
    """Rank 1 does something else."""
    state = PartialState(timeout=LIMIT)
    if rank == 1:
        with state.main_process_first():  # ELSEWHERE
            pass
    state.wait_for_everyone()  # WAITS
    return "never"


def never_comes(rank, size):
    """The last rank lives, and does not come in time."""
    state = PartialState(timeout=datetime.timedelta(seconds=1))
    if rank == size - 1:
        time.sleep(2.5)  # longer than the limit: what is tested
    state.wait_for_everyone()  # WAITS
    return "never"


def uses_a_group_that_is_there(rank, size):
    """Somebody else formed the group."""
    torch.distributed.init_process_group("gloo")
    state = PartialState()
    state.wait_for_everyone()
    return state.process_index, state.num_processes, state.backend


def fails_then_starts(rank, size):
    """A start that failed leaves nothing behind."""
    try:
        PartialState(backend="nonsense")
    except ProcessGroupError as error:
        first = type(error).__name__
    kept = dict(PartialState._shared_state)
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    state = PartialState()
    state.wait_for_everyone()
    return first, kept, state.num_processes


def starts_on_all_but_the_last(rank, size):
    """The collectives of the last rank fail after those of the others stand."""
    start = torch.distributed.init_process_group

    def fail(*args, **kwargs):
        start(*args, **kwargs)
        raise RuntimeError("no link")

    if rank == size - 1:
        torch.distributed.init_process_group = fail
    try:
        PartialState()
    except ProcessGroupError as error:
        return str(error), torch.distributed.is_initialized()
    return "started"


def starts_again(rank, size):
    """A group that was destroyed can be formed again."""
    found = []
    for _ in range(2):
        state = PartialState()
        state.wait_for_everyone()
        found.append(state.num_processes)
        state.destroy_process_group()
        PartialState._reset_state()
    return found


def resets_the_state(rank, size):
    """The state is made anew, on rank 0 once more than elsewhere, and the group goes on."""
    found = []
    for turn in range(4):
        state = PartialState(timeout=LIMIT)
        (told,) = {bytes(part) for part in state.meet("turn", turn, b"%d" % turn)}
        found.append(int(told))
        if rank == 0 and turn == 2:
            PartialState._reset_state()
            state = PartialState(timeout=LIMIT)
        state.wait_for_everyone()
        PartialState._reset_state()
    return found


def logs(rank, size):
    """Who logs what, with the order in which ranks wrote to one file."""
    path = os.environ["LOG_FILE"]
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(message)s %(funcName)s"))
    logger = get_logger("ranks", "INFO")
    logger.logger.addHandler(handler)
    logger.info("main")
    PartialState().wait_for_everyone()
    logger.info("rank %d", rank, main_process_only=False, in_order=True)
    logger.warning_once("once")
    logger.warning_once("once")
    logger.debug("not at this level", main_process_only=False, in_order=True)
    return PartialState().num_processes


def is_in_a_group(rank, size):
    """What a process that a launcher started knows of itself."""
    state = PartialState()
    state.wait_for_everyone()
    line = f"I am {state.process_index} of {state.num_processes} {state.distributed_type}"
    state.destroy_process_group()
    return line
