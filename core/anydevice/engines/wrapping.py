"""Which modules are sharded, checkpointed or compiled as units: a model's blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from anydevice.errors import OptionError
from anydevice.placement import find_blocks

__all__ = ["units_of"]

#: They have no forward of their own.
_LISTS = (nn.ModuleList, nn.ModuleDict)


def units_of(model: nn.Module, plugin: Any = None) -> list[nn.Module]:
    """A model's units, inner ones first; the model itself is not among them.

    A unit that is to be sharded has its parameters alone: one whose parameter the model also has
    elsewhere, such as a tied weight, is none.

    Args:
        model: any.
        plugin: the user's choices about sharding; None takes the blocks that placement finds.

    Raises:
        OptionError: a class is named that the model has not.

    Example:
        >>> from torch import nn
        >>> from anydevice.engines import units_of
        >>> model = nn.Sequential(*(nn.TransformerEncoderLayer(4, 1, 8) for _ in range(2)))
        >>> len(units_of(model))
        2
    """
    return _blocks(model) if plugin is None else _apart(model, _chosen(model, plugin))


def _chosen(model: nn.Module, plugin: Any) -> list[nn.Module]:
    """What the user wants to be units."""
    policy = plugin.auto_wrap_policy
    names = plugin.transformer_cls_names_to_wrap
    if policy == "no_wrap":
        return []
    if names:
        kinds = {type(module).__name__ for module in model.modules()}
        missing = [name for name in names if name not in kinds]
        if missing:
            raise OptionError(
                f"transformer_cls_names_to_wrap: the model has no {missing[0]!r}; it has "
                f"{', '.join(sorted(kinds))}"
            )
        return _bottom_up(model, lambda module: type(module).__name__ in names)
    if policy == "size_based_wrap":
        return _by_size(model, plugin.min_num_params)
    if callable(policy):
        return _bottom_up(
            model,
            lambda module: bool(
                policy(
                    module=module,
                    recurse=False,
                    nonwrapped_numel=sum(p.numel() for p in module.parameters()),
                )
            ),
        )
    return _blocks(model)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that placement finds."""
    blocks = [model.get_submodule(name) for name in find_blocks(model) if name]
    return [block for block in blocks if not isinstance(block, _LISTS)]


def _bottom_up(model: nn.Module, chosen: Any) -> list[nn.Module]:
    modules = [m for m in model.modules() if m is not model and not isinstance(m, _LISTS)]
    found = [module for module in modules if chosen(module)]
    return found[::-1]


def _by_size(model: nn.Module, least: int) -> list[nn.Module]:
    """Modules of at least so many parameters that no unit within them has already."""
    units: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        own = sum(p.numel() for p in module.parameters(recurse=False))
        rest = own + sum(visit(child) for child in module.children())
        if rest >= least and module is not model and not isinstance(module, _LISTS):
            units.append(module)
            return 0
        return rest

    visit(model)
    return units


def _apart(model: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """Those whose parameters no other unit around or beside them has: one is sharded once."""
    homes: dict[int, list[nn.Module]] = {}
    for top in (model, *units):
        for parameter in {id(p) for p in _own_parameters(top, units)}:
            homes.setdefault(parameter, []).append(top)
    shared = {
        id(top)
        for tops in homes.values()
        for top in tops
        if not all(any(other is module for module in top.modules()) for other in tops)
    }
    kept = [unit for unit in units if id(unit) not in shared]
    return kept if len(kept) == len(units) else _apart(model, kept)


def _own_parameters(top: nn.Module, units: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    """Parameters that are reached from a module without going through a unit."""
    left, seen = [top], {id(unit) for unit in units}
    while left:
        module = left.pop()
        yield from module.parameters(recurse=False)
        left += [child for child in module.children() if id(child) not in seen]
        seen |= {id(child) for child in module.children()}
