"""An interrupt at any instruction leaves the model whole."""

import os
import random
import threading

import pytest
import torch
from tests.interrupting import ROOT, AtLine
from tests.transfer.conftest import Offloaded, make_blocks, same

from anydevice.devices import CPU

FOLDER = os.path.join(ROOT, "transfer")


def run(model, x, grad):
    """A forward as hooks run it."""
    whole = model.engine.whole_pass()
    with torch.set_grad_enabled(grad):
        try:
            try:
                whole.begin()
                x = x.to("sim:0")
                for group, block in zip(model.groups, model.blocks, strict=True):
                    call = group.call()
                    try:
                        try:
                            call.enter()
                            x = block(x)
                        finally:
                            call.leave()
                    finally:
                        call.leave()
            finally:
                whole.end()
        finally:
            whole.end()
    return x


def require_whole(model, before):
    for block, tensors in zip(model.blocks, before, strict=True):
        for name, tensor in (*block.named_parameters(), *block.named_buffers()):
            assert tensor is tensors[name]
            assert tensor.device == CPU.torch
    engine = model.engine
    assert not engine.resident
    assert not any(current.calls for current in engine._passes.values())
    ahead = set(map(id, engine._prefetcher._ahead.values()))
    buffers = engine._prefetcher.engine(model.device).pool._buffers
    assert [b for b in buffers if b.holder is not None and id(b.holder) not in ahead] == []
    assert not engine._lock._is_owned()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("options", [{}, {"pin_budget": 0}], ids=["pinned", "staged"])
def test_an_interrupt_at_any_line_leaves_the_model_whole(sim, x, options, grad):
    def made():
        model = Offloaded(make_blocks(3), prefetch_depth=1, **options)
        before = [dict((*b.named_parameters(), *b.named_buffers())) for b in model.blocks]
        return model, before

    others = set(threading.enumerate())
    model, _ = made()

    def twice():
        for _ in range(2):
            run(model, x, grad)

    all_lines = AtLine(folder=FOLDER)
    all_lines.during(twice)
    wanted = model.plain(x)
    model.engine.close()
    draw = random.Random(0)
    for at in sorted(draw.sample(range(1, all_lines.count), 60)):
        model, before = made()
        default = torch.sim.current_stream(0)
        line = AtLine(at, FOLDER)
        # An executor's thread, a staged chunk: the count differs a little between runs.
        assert line.during(twice) is not None or line.place is None
        place = line.place
        try:
            require_whole(model, before)
            assert torch.sim.current_stream(0) == default
            for _ in range(2):
                assert same(run(model, x, False), wanted)
            require_whole(model, before)
        except AssertionError as error:
            raise AssertionError(f"after an interrupt in {place}: {error}") from error
        finally:
            model.engine.close()
    assert set(threading.enumerate()) <= others
