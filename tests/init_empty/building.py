"""What programs do with modules, and the two builds of a program."""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from collections.abc import Callable

import torch
from tests.init_empty.programs import (
    CHANGES,
    CONTEXTS,
    OPERATIONS,
    SOURCES,
    VIEWS,
    Instruction,
    N,
    Tensor,
)
from torch import nn

from anydevice import init_empty_weights


class Built(nn.Module):
    """A module that a program builds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = [torch.ones(N, N), torch.tensor([[0.5] * N] * N)]
        self.linear = nn.Linear(5, 3)
        self.weight = nn.Parameter(torch.randn(N, N))

    def name(self) -> str:
        return f"n{len(self._parameters) + len(self._buffers) + len(self._modules)}"

    def add(self, value: nn.Module | nn.Parameter) -> None:
        setattr(self, self.name(), value)

    @property
    def any_parameter(self) -> nn.Parameter:
        """The newest parameter."""
        return list(self._parameters.values())[-1]


class Child(nn.Module):
    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(a.detach())
        self.register_buffer("table", b)
        self.register_buffer("scale", self.weight.detach().abs().amax())
        self.plain = b * 2


#: What is done with modules and parameters; a tensor that is given is appended to the pool.
MODULES: list[Callable[[Built, Tensor, Tensor], object]] = [
    lambda m, a, b: m.register_buffer(m.name(), a),
    lambda m, a, b: m.register_buffer(m.name(), a, persistent=False),
    lambda m, a, b: m.add(nn.Parameter(a.clone())),
    lambda m, a, b: m.add(nn.Parameter(a)),
    lambda m, a, b: m.add(nn.Parameter(a[0])),
    lambda m, a, b: m.register_parameter(m.name(), nn.Parameter(a.detach().t(), False)),
    lambda m, a, b: m.add(m.any_parameter),
    lambda m, a, b: m.any_parameter.data,
    lambda m, a, b: m.weight.detach(),
    lambda m, a, b: m.any_parameter.data[0],
    lambda m, a, b: m.any_parameter.detach().clone(),
    lambda m, a, b: nn.init.normal_(m.any_parameter) and None,
    lambda m, a, b: nn.init.trunc_normal_(m.any_parameter) and None,
    lambda m, a, b: m.weight.data.copy_(a) and None,
    lambda m, a, b: setattr(m.any_parameter, "data", a),
    lambda m, a, b: m.weight.data.__setitem__(0, b[1]),
    lambda m, a, b: torch.no_grad()(m.weight.add_)(b) and None,
    lambda m, a, b: m.weight.detach() @ a,
    lambda m, a, b: (m.weight * a).sum().backward(),
    lambda m, a, b: m.add(nn.Linear(3, 2)),
    lambda m, a, b: m.add(nn.Embedding(5, 3, padding_idx=1)),
    lambda m, a, b: m.add(nn.BatchNorm1d(3)),
    lambda m, a, b: m.add(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))),
    lambda m, a, b: m.add(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))),
    lambda m, a, b: m.add(Child(a, b)),
    lambda m, a, b: m.add(copy.deepcopy(list(m.children())[-1])),
    lambda m, a, b: m.add(nn.ParameterList([a.clone(), nn.Parameter(b)])),
    lambda m, a, b: m.pool.pop() and None,
    lambda m, a, b: m._buffers.popitem() and None,
    lambda m, a, b: m.float() and None,
    lambda m, a, b: m.linear.to(torch.float64) and None,
    lambda m, a, b: nn.functional.linear(a, m.weight).detach(),
    lambda m, a, b: copy.deepcopy(m.any_parameter).detach(),
    lambda m, a, b: torch.func.functional_call(m.linear, {}, (torch.ones(5),)).detach(),
    lambda m, a, b: torch.from_numpy(m.weight.detach().numpy()),
    lambda m, a, b: setattr(m.weight, "requires_grad", False),
]


def run(built: Built, instruction: Instruction) -> None:
    """Run one instruction."""
    kind, what, first, second, around = instruction
    pool = built.pool
    a, b = pool[first % len(pool)], pool[second % len(pool)]
    with CONTEXTS[around % len(CONTEXTS)]():
        if kind == "s":
            result = SOURCES[what % len(SOURCES)]()
        elif kind == "m":
            result = MODULES[what % len(MODULES)](built, a, b)
        elif kind == "c":
            target = a.contiguous() if 0 in a.stride() else a
            result = CHANGES[what % len(CHANGES)](target, b.clone()) and None
        else:
            table = OPERATIONS if kind == "o" else VIEWS
            result = table[what % len(table)](a, b)
    if isinstance(result, Tensor):
        pool.append(result)


def build(program: list[Instruction], *, empty: bool) -> Built:
    """Run a program under a seed; where an instruction fails, the error has its index."""
    torch.manual_seed(3)
    with warnings.catch_warnings(), init_empty_weights() if empty else contextlib.nullcontext():
        warnings.simplefilter("ignore")
        built = Built()
        for index, instruction in enumerate(program):
            try:
                run(built, instruction)
            except Exception as error:
                raise Failed(index) from error
        built.register_buffer("noise", torch.randn(3))
    return built


class Failed(Exception):
    """An instruction failed."""


def sound(program: list[Instruction]) -> list[Instruction]:
    """A program without what fails in a plain build."""
    program = list(program)
    while True:
        try:
            build(program, empty=False)
        except Failed as failed:
            del program[failed.args[0]]
        else:
            return program


def compare(program: list[Instruction]) -> None:
    """Check that what is no parameter equals the plain build's, and shares memory as there."""
    plain = build(program, empty=False)
    state = torch.get_rng_state()
    empty = build(program, empty=True)
    assert torch.equal(torch.get_rng_state(), state), "another state of the generator"
    expected, actual = dict(plain.named_parameters()), dict(empty.named_parameters())
    assert expected.keys() == actual.keys(), "other parameters"
    for name, parameter in actual.items():
        assert parameter.is_meta, f"{name} is not on meta"
        assert traits(parameter) == traits(expected[name]), name
    # A tensor that shares the memory of a parameter may be on meta as that is, unless registered.
    owned = {p.untyped_storage().data_ptr() for p in expected.values()}
    pairs = list(zip(tensors(plain, owned), tensors(empty), strict=False))
    pairs = [(n, a, b) for (n, a), (m, b) in pairs if a is not None]
    equal(pairs)
    with torch.no_grad():
        for i, (_name, a, b) in enumerate(pairs):
            if not (a.requires_grad or a.is_inference() or 0 in a.stride()):
                a.copy_(a + i % 2)
                b.copy_(b + i % 2)
    equal(pairs)


def traits(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.stride(), tensor.requires_grad


def tensors(built: Built, owned: frozenset[int] | set[int] = frozenset()):
    """All that is no parameter, by name; None for what may be on meta."""
    yield from built.named_buffers()
    plain = [(f"{n}.plain", m.plain) for n, m in built.named_modules() if isinstance(m, Child)]
    for name, tensor in [*((f"pool {i}", t) for i, t in enumerate(built.pool)), *plain]:
        may_wait = not tensor.is_meta and tensor.untyped_storage().data_ptr() in owned
        yield name, None if may_wait else tensor


def equal(pairs: list[tuple[str, Tensor, Tensor]]) -> None:
    for name, a, b in pairs:
        assert b.device == a.device, f"{name} is on {b.device}"
        # A graph of gradients is not rebuilt; views made in inference mode hide that they have one.
        count = 4 if a.is_leaf and not a._is_view() else 3
        assert traits(a)[:count] == traits(b)[:count], f"{name}: {traits(b)}, not {traits(a)}"
        torch.testing.assert_close(
            b, a, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


def wrong(program: list[Instruction]) -> BaseException | None:
    """What is wrong with a program's builds; None if nothing is."""
    try:
        compare(program)
    except Exception as error:  # noqa: BLE001 - any failure is one
        return error
    return None


def shrunk(program: list[Instruction]) -> list[Instruction]:
    """A smaller program that fails in the same way."""
    kind = type(wrong(program))
    smaller = True
    while smaller:
        smaller = False
        for i, instruction in enumerate(program):
            plainer = (*instruction[:4], 0)
            for other in (
                program[:i] + program[i + 1 :],
                [*program[:i], plainer, *program[i + 1 :]],
            ):
                if other != program and other == sound(other) and type(wrong(other)) is kind:
                    program, smaller = other, True
                    break
            if smaller:
                break
    return program


def random_program(seed: int) -> list[Instruction]:
    """A program that is a function of its seed alone."""
    draw = random.Random(seed)
    return [
        (
            draw.choice("sssooovvccmmm"),
            *(draw.randrange(1000) for _ in range(3)),
            draw.choice((0, 0, 0, draw.randrange(1000))),
        )
        for _ in range(draw.randrange(1, 16))
    ]
