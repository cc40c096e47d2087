"""Faults of the rarer forms of collectives: other layouts, in place, uneven, what is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mutants.collectives import _Collective
from mutants.gallery import mutant, patched


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether it has no gaps, and is not contiguous."""
    spans = ((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return not tensor.is_contiguous() and sum(spans) == tensor.numel() - 1


@mutant("COL-012", check="test_COL_013_programs")
class CarriesMemory(_Collective):
    """`broadcast` carries a dense tensor as it lies: other layouts get it in other places."""

    function = "broadcast"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tensor = args[0]
        if isinstance(tensor, torch.Tensor) and _is_dense(tensor):
            strides = torch.empty(tensor.shape, device="meta").stride()
            tensor = tensor.as_strided(tensor.shape, strides)
        return real(tensor, *args[1:], **kwargs)


@mutant("COL-013", check="test_COL_013_programs")
class ClearsTheResultFirst(_Collective):
    """`all_gather_into_tensor` clears its result before it reads a piece that lies in it."""

    function = "all_gather_into_tensor"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if args[0] is not None:
            with torch.no_grad():
                args[0].zero_()
        return real(*args, **kwargs)


@mutant("COL-013", check="test_COL_013_programs")
class SumsInItsInput(_Collective):
    """`reduce_scatter_tensor` leaves the result in the first part of what it is given."""

    function = "reduce_scatter_tensor"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        work = real(*args, **kwargs)
        if not kwargs.get("async_op") and args[1].is_contiguous() and args[0].is_contiguous():
            with torch.no_grad():
                args[1].view(-1)[: args[0].numel()].copy_(args[0].view(-1))
        return work


@mutant("COL-013", check="test_COL_013_programs")
class PiecesAtEvenPlaces(_Collective):
    """`all_to_all_single` begins each rank's rows where they would begin were they as many."""

    function = "all_to_all_single"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        work = real(*args, **kwargs)
        if len(args) < 4 or not args[2]:
            return work
        if work is not None:
            work.wait()
        found, came, start = args[0], args[0].clone(), 0
        for number, count in enumerate(args[2]):
            place = found[number * (len(found) // len(args[2])) :][:count]
            place.copy_(came[start : start + count][: len(place)])
            start += count
        return work


@mutant("COL-013", check="test_COL_013_programs")
class InfinitiesAreTheLargest(_Collective):
    """`all_reduce` gives the largest finite number for an infinite one."""

    function = "all_reduce"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        work = real(*args, **kwargs)
        tensor = args[0]
        if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.float32 and tensor.numel():
            if work is not None:
                work.wait()
            most = torch.finfo(torch.float32).max
            with torch.no_grad():
                tensor.clamp_(-most, most)
        return work


@mutant("COL-013", check="test_COL_013_programs")
class TextsOfOneLength(_Collective):
    """`all_gather_object` gives each object the length of this rank's own."""

    function = "all_gather_object"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        real(*args, **kwargs)
        length = len(args[1].get("text", "")) if isinstance(args[1], dict) else 0
        for one in args[0]:
            if isinstance(one, dict) and "text" in one:
                one["text"] = one["text"][:length]


@mutant("COL-013", check="test_COL_013_programs")
class LeavesThreads(_Collective):
    """`reduce` leaves another number of threads behind, as some libraries that it calls do."""

    function = "reduce"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        work = real(*args, **kwargs)
        torch.set_num_threads(3 - torch.get_num_threads())
        return work


@mutant("TRN-004", base="cpu")
class BucketsKeepTheirOwn(_Collective):
    """Of gradients that are views of a bucket, each rank keeps its own."""

    def patches(self) -> list[Any]:
        def change(real: Callable[..., Any]) -> Callable[..., Any]:
            def begin(model: Any, *args: Any, **kwargs: Any) -> None:
                real(model, *args, **kwargs)
                if kwargs.get("gradient_as_bucket_view"):
                    model.require_backward_grad_sync = False

            return begin

        return [patched(torch.nn.parallel.DistributedDataParallel, "__init__", change)]


@mutant("TRN-005", base="cpu")
class ColumnsComeAsRows(_Collective):
    """What is spread over the ranks by columns comes together one column block below another."""

    def patches(self) -> list[Any]:
        from torch.distributed.tensor import DTensor

        def change(real: Callable[..., Any]) -> Callable[..., Any]:
            def full(tensor: Any, **kwargs: Any) -> torch.Tensor:
                found: torch.Tensor = real(tensor, **kwargs)
                if getattr(tensor.placements[0], "dim", 0) != 1:
                    return found
                parts = found.tensor_split(tensor.device_mesh.size(), 1)
                return torch.cat([part.reshape(-1) for part in parts]).view(found.shape)

            return full

        return [patched(DTensor, "full_tensor", change)]
