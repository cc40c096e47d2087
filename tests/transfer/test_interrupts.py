"""An interrupt at any instruction leaves the model whole."""

import linecache
import os
import random
import sys
import threading

import pytest
import torch
from tests.transfer.conftest import Offloaded, make_blocks, same

import anydevice
from anydevice.devices import CPU

FOLDER = os.path.join(os.path.dirname(anydevice.__file__), "transfer")


class Interrupter:
    """Raises KeyboardInterrupt at the n-th line that this thread runs in `anydevice.transfer`."""

    def __init__(self, at=None):
        self.at = at
        self.lines = 0
        self.place = None
        self._open = set()

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _trace(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        if event == "line" and not self._ends_with_statement(frame):
            self.lines += 1
            if self.lines == self.at:
                self.place = (frame.f_code.co_name, frame.f_lineno)
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._trace

    def _ends_with_statement(self, frame):
        """Python names the line of a ``with`` once more at its end, where no interrupt arrives."""
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        if not line.startswith("with "):
            return False
        key = (id(frame), frame.f_lineno)
        begins = key not in self._open
        self._open ^= {key}
        return not begins


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
    with Interrupter() as all_lines:
        for _ in range(2):
            run(model, x, grad)
    wanted = model.plain(x)
    model.engine.close()
    draw = random.Random(0)
    for at in sorted(draw.sample(range(1, all_lines.lines), 60)):
        model, before = made()
        default = torch.sim.current_stream(0)
        with Interrupter(at) as interrupter:
            try:
                for _ in range(2):
                    run(model, x, grad)
            except KeyboardInterrupt:
                pass
            else:
                # An executor's thread, a staged chunk: the count differs a little between runs.
                assert interrupter.place is None
        place = interrupter.place
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
