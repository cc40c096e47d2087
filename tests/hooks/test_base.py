from __future__ import annotations

import asyncio
import copy
import inspect
import io
import pickle
import threading

import pytest
import torch
from torch import nn

from anydevice.hooks import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)


class Note(ModelHook):
    """Writes down what it sees."""

    def __init__(self, name, log, fail=None):
        self.name, self.log, self.fail = name, log, fail

    def _note(self, event):
        self.log.append(f"{event} {self.name}")
        if event == self.fail:
            raise ValueError(f"{event} {self.name}")

    def init_hook(self, module):
        self._note("init")
        return module

    def detach_hook(self, module):
        self._note("detach")
        return module

    def pre_forward(self, module, *args, **kwargs):
        self._note("pre")
        return args, kwargs

    def post_forward(self, module, output):
        self._note("post")
        return output


class Closing(Note):
    """Runs the call itself, to let go of what it took whatever happens."""

    def run_forward(self, module, forward, args, kwargs):
        self._note("open")
        try:
            return super().run_forward(module, forward, args, kwargs)
        finally:
            self._note("close")


class AddOne(ModelHook):
    def pre_forward(self, module, *args, **kwargs):
        return tuple(arg + 1 for arg in args), {k: v + 1 for k, v in kwargs.items()}


class Double(ModelHook):
    def post_forward(self, module, output):
        return output * 2


class Pass(nn.Module):
    def forward(self, x, *, y=0):
        """Add."""
        return x + y


class Boom(nn.Module):
    def forward(self):
        raise KeyError("boom")


def test_arguments_and_output_go_through_the_hook():
    module = add_hook_to_module(Pass(), AddOne())
    assert module(1, y=2) == 5
    assert module.forward(1, y=2) == 5
    assert module(1) == 2
    add_hook_to_module(module, Double(), append=True)
    assert module(1, y=2) == 10


def test_a_new_hook_takes_the_place_of_the_old():
    log = []
    module = add_hook_to_module(Pass(), Note(1, log))
    add_hook_to_module(module, Note(2, log))
    module(1)
    assert log == ["init 1", "detach 1", "init 2", "pre 2", "post 2"]
    assert remove_hook_from_module(module) is module
    assert log[-1] == "detach 2"
    assert not {"forward", "_hf_hook", "_old_forward"} & vars(module).keys()


def test_appended_hooks_run_in_order_and_flat():
    log = []
    module = Pass()
    for i in range(3):
        add_hook_to_module(module, Note(i, log), append=True)
    assert isinstance(module._hf_hook, SequentialHook)
    assert [hook.name for hook in module._hf_hook.hooks] == [0, 1, 2]
    module(1)
    assert log == [f"{event} {i}" for event in ("init", "pre", "post") for i in range(3)]


@pytest.mark.parametrize(
    ("fail", "seen"),
    [
        ((1, "pre"), ["pre 0", "open 1", "pre 1", "close 1"]),
        ((2, "pre"), ["pre 0", "open 1", "pre 1", "pre 2", "close 1"]),
        ((2, "post"), ["pre 0", "open 1", "pre 1", "pre 2", "post 2", "close 1"]),
        (
            (0, "post"),
            ["pre 0", "open 1", "pre 1", "pre 2", "post 2", "post 1", "close 1", "post 0"],
        ),
    ],
)
def test_a_hook_that_runs_the_call_lets_go_whatever_fails(fail, seen):
    log = []
    module = Pass()
    for i, kind in enumerate((Note, Closing, Note)):
        add_hook_to_module(module, kind(i, log, fail[1] if i == fail[0] else None), append=True)
    log.clear()
    with pytest.raises(ValueError, match=f"{fail[1]} {fail[0]}"):
        module(1)
    assert log == seen


def test_a_forward_that_raises():
    log = []
    module = add_hook_to_module(Boom(), Note(0, log))
    add_hook_to_module(module, Closing(1, log), append=True)
    log.clear()
    for _ in range(2):
        with pytest.raises(KeyError, match="boom"):
            module()
    assert log == ["pre 0", "open 1", "pre 1", "close 1"] * 2


def test_signature_name_and_doc_are_the_forwards_own():
    plain, module = Pass(), add_hook_to_module(Pass(), ModelHook())
    assert inspect.signature(module.forward) == inspect.signature(plain.forward)
    assert module.forward.__name__ == "forward"
    assert inspect.unwrap(module.forward) == module._old_forward


def test_a_forward_that_was_in_the_instance_comes_back():
    module = Pass()
    mine = module.forward = lambda x: x * 3
    add_hook_to_module(module, AddOne())
    assert module(1) == 6
    remove_hook_from_module(module)
    assert module.forward is mine


def test_recursive_removal():
    model = nn.Sequential(Pass(), nn.Sequential(Pass()))
    for module in model.modules():
        add_hook_to_module(module, AddOne())
    assert model(0) == 4
    remove_hook_from_module(model)
    assert model(0) == 2 + 1
    remove_hook_from_submodules(model)
    assert model(0) == 0
    assert not any("forward" in vars(module) for module in model.modules())


def test_no_grad_holds_for_the_forward_alone():
    class NoGrad(ModelHook):
        no_grad = True

    module = add_hook_to_module(nn.Linear(2, 2), NoGrad())
    assert not module(torch.ones(2)).requires_grad
    assert torch.is_grad_enabled()
    add_hook_to_module(module, ModelHook(), append=True)
    assert not module(torch.ones(2)).requires_grad


def test_deep_copy_has_its_own_forward():
    model = nn.Sequential(add_hook_to_module(nn.Linear(2, 2), Double()))
    again = copy.deepcopy(model)
    assert again[0].forward.__self__ is again[0]
    assert again[0]._old_forward.__self__ is again[0]
    x = torch.ones(2)
    with torch.no_grad():
        again[0].weight.zero_()
        again[0].bias.fill_(1)
    assert torch.equal(again(x), torch.full((2,), 2.0))
    assert not torch.equal(model(x), again(x))


@pytest.mark.parametrize("protocol", [2, 5])
def test_pickle(protocol):
    model = nn.Sequential(add_hook_to_module(nn.Linear(2, 2), Double()))
    again = pickle.loads(pickle.dumps(model, protocol))
    assert again[0].forward.__self__ is again[0]
    assert torch.equal(again(torch.ones(2)), model(torch.ones(2)))


def test_torch_save():
    model = nn.Sequential(add_hook_to_module(nn.Linear(2, 2), Double()))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    assert torch.equal(again(torch.ones(2)), model(torch.ones(2)))


class Counting(nn.Module):
    def forward(self, start):
        try:
            for i in range(2):
                got = yield start + i
                if got is not None:
                    yield got
        except KeyError:
            yield "caught"


class Scope(ModelHook):
    no_grad = True

    def __init__(self):
        self.ended = 0

    def post_forward(self, module, output):
        self.ended += 1
        return output


def test_a_forward_that_is_a_generator_keeps_the_hook_until_it_is_done():
    scope = Scope()
    module = add_hook_to_module(Counting(), scope)
    for i, item in enumerate(module(5)):
        assert item == 5 + i
        assert torch.is_grad_enabled()
        assert scope.ended == 0
    assert scope.ended == 1

    body = module(1)
    assert next(body) == 1
    assert body.send("word") == "word"
    assert body.throw(KeyError()) == "caught"
    body.close()
    assert scope.ended == 1


class Asynchronous(nn.Module):
    async def forward(self, x):
        assert not torch.is_grad_enabled()
        await asyncio.sleep(0)
        assert not torch.is_grad_enabled()
        return x + 1


class Stream(nn.Module):
    async def forward(self, x):
        try:
            for i in range(x):
                assert not torch.is_grad_enabled()
                await asyncio.sleep(0)
                yield i
        finally:
            assert not torch.is_grad_enabled()


def test_forwards_that_are_coroutines_and_asynchronous_generators():
    scope = Scope()
    one, many = (add_hook_to_module(module, scope) for module in (Asynchronous(), Stream()))

    async def run():
        assert await asyncio.gather(one(1), one(2)) == [2, 3]
        assert scope.ended == 2
        assert [i async for i in many(3)] == [0, 1, 2]
        async for i in many(5):
            assert torch.is_grad_enabled()
            if i == 1:
                break
        assert torch.is_grad_enabled()

    asyncio.run(run())


def test_threads_on_one_hooked_module():
    log = []
    module = add_hook_to_module(Pass(), AddOne())
    barrier = threading.Barrier(4)

    def work(i):
        barrier.wait(10)
        log.extend(module(i, y=1) - i for _ in range(50))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert log == [3] * 200
