"""A machine that cannot be is refused, and says which option is wrong."""

import pytest

from anydevice_conformance.simulator import options
from anydevice_conformance.simulator.options import Options, parse_options


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mode": "eager"}, "the modes are sync, lazy, thread, random"),
        ({"h2d": 0}, "h2d=0: a bandwidth is above 0"),
        ({"kernel": -1}, "kernel=-1: a time is 0 us or more"),
        ({"memory": "lots"}, "'lots' is not a size"),
        ({"memory": ["1GiB"]}, "1 values for 2 devices"),
    ],
)
def test_impossible_machines_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Options(**wrong)


def test_the_number_of_devices_is_limited(simulator):
    with pytest.raises(RuntimeError, match="1 to 16 devices"):
        simulator.configure(devices=17)


def test_configure_resets_what_it_does_not_name(simulator):
    simulator.configure(devices=3, memory="1MiB", mode="sync")
    simulator.configure()
    import torch

    assert torch.sim.device_count() == 2
    assert torch.sim.mem_get_info(0)[1] == 1 << 30
    torch.ones(1, pin_memory=True).to("sim:0", non_blocking=True)
    assert not torch.sim.current_stream(0).query()


def test_options_are_read_from_text():
    assert parse_options("1") == Options()
    got = parse_options("devices=3, memory=64MiB:1GiB:2GiB ,mode=random,seed=4,poison=0,h2d=5")
    assert got.capacities() == [64 << 20, 1 << 30, 2 << 30]
    assert (got.mode, got.seed, got.poison, got.h2d) == ("random", 4, False, 5.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("devices", "cannot read 'devices'"),
        ("device=2", "cannot read 'device=2'"),
        ("devices=two", "devices=two: 'two' is not a whole number"),
        ("h2d=fast", "h2d=fast: 'fast' is not a number"),
        ("poison=maybe", "poison=maybe: 'maybe' is neither true nor false"),
        ("mode=x", "mode"),
    ],
)
def test_unreadable_text_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        parse_options(text)


def test_every_option_can_be_read_from_text():
    assert set(options._READERS) == set(Options.__dataclass_fields__)
