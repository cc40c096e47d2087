"""Random models and device maps, for the property tests.

A model is drawn as a nested description and built from a seed, so that two builds of one
description are equal. Its own code does all that users' models do: residuals, weights used without
calling the child, parameters beside modules, shared and tied parts, dicts passed along, several
outputs.
"""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

WIDTH = 8


class Residual(nn.Module):
    """``x + scale * inner(x)``, with a parameter and a buffer of its own."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("shift", torch.randn(WIDTH), persistent=False)
        self.inner = inner

    def forward(self, x, notes=None):
        if notes is not None:
            notes["seen"] = notes.get("seen", 0) + 1
        return x + self.scale * call(self.inner, x, notes) + self.shift


class Borrower(nn.Module):
    """Uses the weights of its children without calling them."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.more = nn.ParameterList([nn.Parameter(torch.randn(WIDTH)) for _ in range(2)])

    def forward(self, x):
        return F.linear(x, self.dense.weight, self.dense.bias) * self.more[0] + self.more[1]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mha = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        y = self.norm(x)[None]
        return self.mha(y, y, y, need_weights=True)[0][0]


class Branches(nn.Module):
    """Several children in a ModuleDict, one perhaps used twice; a counter changed in place."""

    def __init__(self, children: list[nn.Module]):
        super().__init__()
        self.parts = nn.ModuleDict({f"p{i}": child for i, child in enumerate(children)})
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x, notes=None):
        self.calls += 1
        outputs = {name: call(part, x, notes) for name, part in self.parts.items()}
        return torch.stack(list(outputs.values())).mean(0) + self.calls


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.rnn(x[None])[0][0]


class Loose(nn.Module):
    """Keeps a tensor that is neither parameter nor buffer."""

    def __init__(self):
        super().__init__()
        self.table = torch.linspace(-1, 1, WIDTH)
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.fc(x) * self.table


class Net(nn.Module):
    """Ids in; a dict out."""

    def __init__(self, body: list[nn.Module], tie: bool, share: bool):
        super().__init__()
        self.embed = nn.Embedding(13, WIDTH)
        self.gain = nn.Parameter(torch.randn(WIDTH))
        self.layers = nn.ModuleList(body)
        if share:
            self.layers.append(self.layers[0])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 13, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, ids, mask=None):
        notes: dict = {}
        x = self.embed(ids) * self.gain
        if mask is not None:
            x = x * mask[:, None]
        for layer in self.layers:
            x = x + call(layer, x, notes)
        x = self.norm(x)
        return {"logits": self.head(x), "same": F.linear(x, self.head.weight), "notes": notes}


def call(module, x, notes):
    return module(x, notes) if isinstance(module, (Residual, Branches)) else module(x)


def plain(kind: str) -> nn.Module:
    return {
        "linear": lambda: nn.Linear(WIDTH, WIDTH),
        "norm": lambda: nn.BatchNorm1d(WIDTH),
        "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)),
        "attention": Attention,
        "borrower": Borrower,
        "recurrent": Recurrent,
        "loose": Loose,
        "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        "encoder": lambda: nn.TransformerEncoderLayer(
            WIDTH, 2, 16, dropout=0.0, batch_first=True, norm_first=True
        ),
        "identity": nn.Identity,
    }[kind]()


KINDS = [
    "linear",
    "norm",
    "mlp",
    "attention",
    "borrower",
    "loose",
    "recurrent",
    "weight_norm",
    "encoder",
    "identity",
]
_leaf = st.sampled_from(KINDS)
parts = st.recursive(
    _leaf,
    lambda inner: st.one_of(
        st.tuples(st.just("residual"), inner),
        st.tuples(st.just("branches"), st.lists(inner, min_size=1, max_size=3)),
        st.tuples(st.just("twice"), inner),
    ),
    max_leaves=4,
)
descriptions = st.tuples(st.lists(parts, min_size=1, max_size=4), st.booleans(), st.booleans())


def build_part(description) -> nn.Module:
    if isinstance(description, str):
        return plain(description)
    kind, inner = description
    if kind == "residual":
        return Residual(build_part(inner))
    if kind == "twice":
        part = build_part(inner)
        return Branches([part, part])
    return Branches([build_part(i) for i in inner])


def build(description, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    body, tie, share = description
    net = Net([build_part(part) for part in body], tie, share)
    with torch.no_grad():
        for name, buffer in net.named_buffers():
            if "running" in name:
                buffer.uniform_(0.5, 1.5)
    return net.eval()


def draw_map(draw, model: nn.Module, places: list) -> dict:
    """A map at any granularity: each module is an entry by itself, or its parts are entries."""
    device_map: dict = {}

    def visit(name: str, module: nn.Module) -> None:
        own = [*module._parameters, *module._buffers]
        if name and ((not own and not module._modules) or draw(st.integers(0, 2)) == 0):
            device_map[name] = draw(st.sampled_from(places))
            return
        dot = f"{name}." if name else ""
        for key in own:
            if {**module._parameters, **module._buffers}[key] is not None:
                device_map[dot + key] = draw(st.sampled_from(places))
        for key, child in module._modules.items():
            visit(dot + key, child)

    if draw(st.integers(0, 9)) == 0:
        return {"": draw(st.sampled_from(places))}
    visit("", model)
    if draw(st.booleans()):  # entries under an entry: the longest prefix counts
        device_map = {"": draw(st.sampled_from(places)), **device_map}
    return device_map
