"""A hook around a module's forward: before it, after it, and when it fails."""

from __future__ import annotations

import types
from collections.abc import Callable, Generator
from typing import Any, ClassVar

import torch
from torch import nn

__all__ = [
    "HookedForward",
    "ModelHook",
    "SequentialHook",
    "add_hook_to_module",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
    "remove_hooks_of_kind",
]

#: Where a hooked module keeps its hook and its own forward. Other libraries read these names.
HOOK = "_hf_hook"
ORIGINAL = "_old_forward"


_is_compiling = torch.compiler.is_compiling


class ModelHook:
    """Something to do before and after a module's forward; unlike torch's hooks, with its kwargs.

    A call of the hooked module runs `pre_forward`, then `run_forward`, then `post_forward`; or
    `failed_forward` in place of the last when the forward raised.

    Attributes:
        no_grad: run the forward under `torch.no_grad`.
    """

    no_grad: ClassVar[bool] = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Run when the hook is attached.

        Args:
            module: the module it is attached to.

        Returns:
            The module.
        """
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run just before the forward.

        Args:
            module: the module whose forward comes next.
            *args: its positional arguments.
            **kwargs: its keyword arguments.

        Returns:
            The arguments to give to the forward.
        """
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Run just after the forward.

        Args:
            module: the module whose forward has just returned.
            output: what it returned.

        Returns:
            What the caller gets.
        """
        return output

    def failed_forward(self, module: nn.Module, error: BaseException) -> None:
        """Run in place of `post_forward` when the forward raised: let go of what was taken.

        Args:
            module: the module whose forward raised.
            error: what it raised; it goes on to the caller after this.
        """

    def run_forward(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the forward itself: the place for a context that surrounds it.

        Args:
            module: the hooked module.
            forward: its forward, or the next hook's `run_forward` bound to it.
            args: positional arguments.
            kwargs: keyword arguments.

        Returns:
            What the forward returned.
        """
        if self.no_grad:
            with torch.no_grad():
                return forward(*args, **kwargs)
        return forward(*args, **kwargs)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Run when the hook is removed.

        Args:
            module: the module it is removed from.

        Returns:
            The module.
        """
        return module


class SequentialHook(ModelHook):
    """Several hooks as one; each event goes through them in order.

    Args:
        *hooks: the hooks.
    """

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Attach each."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give the arguments through each; when one raises, those before it let go."""
        done: list[ModelHook] = []
        try:
            for hook in self.hooks:
                args, kwargs = hook.pre_forward(module, *args, **kwargs)
                done.append(hook)
        except BaseException as error:
            _let_go(reversed(done), module, error)
            raise
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Give the output through each; when one raises, those after it let go."""
        left = list(self.hooks)
        try:
            while left:
                output = left.pop(0).post_forward(module, output)
        except BaseException as error:
            _let_go(left, module, error)
            raise
        return output

    def failed_forward(self, module: nn.Module, error: BaseException) -> None:
        """Let each let go."""
        _let_go(self.hooks, module, error)

    def run_forward(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Surround the forward with each; the first is the outermost."""
        for hook in reversed(self.hooks):
            forward = _Bound(hook, module, forward)
        return forward(*args, **kwargs)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Detach each."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


class _Bound:
    """One hook's `run_forward` around a forward."""

    def __init__(self, hook: ModelHook, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.hook, self.module, self.forward = hook, module, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.hook.run_forward(self.module, self.forward, args, kwargs)


class HookedForward:
    """What stands as ``forward`` in a hooked module.

    An object with one attribute rather than a closure, so that a deep copy or a pickle of the
    module has one that is bound to the copy, and so that `inspect.signature` sees the module's own
    forward.

    Under ``torch.compile`` it is a graph break: what moves weights must not be traced.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the hook's events around the module's own forward."""
        if _is_compiling():
            return _outside_the_graph(self, args, kwargs)
        module = self.module
        state = module.__dict__
        hook: ModelHook = state[HOOK]
        args, kwargs = hook.pre_forward(module, *args, **kwargs)
        try:
            output = hook.run_forward(module, state[ORIGINAL], args, kwargs)
        except BaseException as error:
            hook.failed_forward(module, error)
            raise
        if type(output) is types.GeneratorType:
            return _drive(hook, module, output)
        return hook.post_forward(module, output)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The module's own forward."""
        original: Callable[..., Any] = self.module.__dict__[ORIGINAL]
        return original

    @property
    def __name__(self) -> str:
        """As the module's own."""
        return "forward"


def _outside_the_graph(forward: HookedForward, args: Any, kwargs: Any) -> Any:
    run = torch.compiler.disable(HookedForward.__call__)  # type: ignore[no-untyped-call]
    return run(forward, *args, **kwargs)


# The compiler must not enter it either. (Its decorator would import the compiler with anydevice.)
_outside_the_graph._torchdynamo_disable = True  # type: ignore[attr-defined]


def _drive(hook: ModelHook, module: nn.Module, body: Any) -> Generator[Any, Any, Any]:
    """Run a forward that is a generator: the hook's work lasts until it is done.

    What the hook puts around the forward is put around each step, so that it does not leak into the
    caller between two of them.
    """
    try:
        step, value = body.send, None
        while True:
            try:
                item = hook.run_forward(module, step, (value,), {})
            except StopIteration as stop:
                result = stop.value
                break
            try:
                value = yield item
                step = body.send
            except GeneratorExit:
                body.close()
                raise
            except BaseException as error:  # noqa: BLE001 - thrown into the generator
                step, value = body.throw, error
    except BaseException as error:
        hook.failed_forward(module, error)
        raise
    return hook.post_forward(module, result)


def _let_go(hooks: Any, module: nn.Module, error: BaseException) -> None:
    """Tell all hooks, even when one of them fails at it; the first such failure is raised last."""
    failure: BaseException | None = None
    for hook in hooks:
        try:
            hook.failed_forward(module, error)
        except BaseException as again:  # noqa: BLE001 - raised below, once the others have let go
            failure = failure or again
    if failure is not None:
        raise failure from error


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Put a hook around a module's forward. `remove_hook_from_module` undoes it.

    Args:
        module: the module; changed in place.
        hook: the hook. It takes the place of one that is there already.
        append: keep the one that is there, and run this one after it (`SequentialHook`).

    Returns:
        The same module.
    """
    state = module.__dict__
    old = state.get(HOOK)
    if old is not None and append:
        module = hook.init_hook(module)
        hooks = old.hooks if type(old) is SequentialHook else (old,)
        state[HOOK] = SequentialHook(*hooks, hook)
        return module
    if old is not None:
        remove_hook_from_module(module)
    module = hook.init_hook(module)
    state[HOOK] = hook
    state[ORIGINAL] = module.forward
    state["forward"] = HookedForward(module)
    return module


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Remove a module's hook, and put its own forward back.

    Args:
        module: the module; changed in place. One without a hook is left as it is.
        recurse: whether the hooks of all its submodules are removed too.

    Returns:
        The same module.
    """
    state = module.__dict__
    hook = state.pop(HOOK, None)
    original = state.pop(ORIGINAL, None)
    if original is not None:
        if getattr(original, "__func__", None) is type(module).forward:
            state.pop("forward", None)
        else:  # one that the user had put in the instance
            state["forward"] = original
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    if hook is not None:  # the outermost is the last, and finds a model without hooks
        hook.detach_hook(module)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks of a module and of all its submodules. Their weights stay where they rest.

    What is left is an ordinary model, with the same Parameters as ever, ties and all. Weights that
    were offloaded are host tensors, and buffers that were kept on a device for them join them
    there; `anydevice.undispatch` also brings all to one device.

    Args:
        module: the module; changed in place.
    """
    remove_hook_from_module(module, recurse=True)


def remove_hooks_of_kind(model: nn.Module, *kinds: type[ModelHook]) -> None:
    """Remove hooks of some classes from a model and its submodules; all others stay.

    Args:
        model: changed in place.
        *kinds: the classes.
    """
    for module in model.modules():
        hook: ModelHook | None = module.__dict__.get(HOOK)
        if hook is None:
            continue
        hooks = hook.hooks if isinstance(hook, SequentialHook) else (hook,)
        kept = [h for h in hooks if not isinstance(h, kinds)]
        if not kept:
            remove_hook_from_module(module)
        elif len(kept) < len(hooks):
            for gone in hooks:
                if isinstance(gone, kinds):
                    gone.detach_hook(module)
            module.__dict__[HOOK] = SequentialHook(*kept) if len(kept) > 1 else kept[0]
