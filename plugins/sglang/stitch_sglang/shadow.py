"""A second model over an image: what its loader writes lands there and cannot touch the live weights.

Modules are copied without their tensors, which are rebuilt over the image with the same class, shape, strides
and attributes. Whatever a module can reach that leads to a module or weight again (weight_loader methods,
partials, closures, containers, objects of quantization methods) is copied with it and leads to the copies;
all else is shared.
"""

from __future__ import annotations

import importlib
import types
from collections import deque
from collections.abc import Callable, Iterator
from copy import copy as shallow
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

CONTAINERS = (dict, list, tuple, set, frozenset, deque)
SCALARS = (bool, int, float, complex, str, bytes, type(None))
REGISTRIES = ("_parameters", "_buffers", "_modules")
OWN_OBJECTS = ("quant_method", "scheme")
"""Attributes of modules whose objects are always copied: post-processing may keep things in them."""


class Unfit(Exception):
    """The model, or a version of it, cannot be staged this way; the message names what of it."""


@dataclass(frozen=True)
class Found:
    """``required``: a parameter or persistent buffer."""

    path: str
    tensor: torch.Tensor
    required: bool


class Survey:
    """What of a live model there is to copy."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._parents: dict[int, list[int]] = {}
        self._things: dict[int, Any] = {}  # keeps what the ids stand for
        self._paths: dict[int, str] = {}
        self._required: set[int] = set()
        self.copied: set[int] = set()
        """Ids of plain things that must be copied."""
        self._walk(model)
        self._spread()
        self.tensors = {
            key: Found(self._paths[key], thing, key in self._required)
            for key, thing in self._things.items()
            if isinstance(thing, torch.Tensor) and self._counts(key)
        }
        """By id."""

    def _walk(self, model: torch.nn.Module) -> None:
        self._paths[id(model)], self._parents[id(model)] = "", []
        todo = deque([model])
        while todo:
            thing: Any = todo.popleft()
            key, path = id(thing), self._paths[id(thing)]
            if key in self._things:
                continue
            self._things[key] = thing
            if isinstance(thing, torch.nn.Module):
                self._note_module(thing)
            for name, child in children(thing):
                if isinstance(child, (*SCALARS, type, types.ModuleType, torch.dtype, torch.device)):
                    continue
                self._parents.setdefault(id(child), []).append(key)
                self._paths.setdefault(id(child), f"{path}.{name}" if path and name else path or name)
                todo.append(child)

    def _note_module(self, module: torch.nn.Module) -> None:
        temporary = module._non_persistent_buffers_set
        self._required.update(id(one) for one in module._parameters.values() if one is not None)
        self._required.update(
            id(one) for name, one in module._buffers.items() if one is not None and name not in temporary
        )
        for name, value in vars(module).items():
            if isinstance(value, CONTAINERS) or (name in OWN_OBJECTS and value is not None):
                self.copied.add(id(value))
            if name in REGISTRIES:
                self._paths[id(value)] = self._paths[id(module)]

    def _spread(self) -> None:
        todo = [
            key for key, thing in self._things.items()
            if isinstance(thing, torch.nn.Module) or key in self._required
        ]  # fmt: skip
        done: set[int] = set()
        while todo:
            for parent in self._parents[todo.pop()]:
                if parent not in done:
                    done.add(parent)
                    todo.append(parent)
        self.copied |= done

    def _counts(self, key: int) -> bool:
        """Whether a tensor belongs to the model, rather than to something that the model only knows."""
        return key in self._required or any(
            parent in self.copied or isinstance(self._things[parent], (torch.nn.Module, torch.Tensor))
            for parent in self._parents[key]
        )


def children(thing: Any) -> Iterator[tuple[str, Any]]:
    """What it refers to, with a name where it has one."""
    if isinstance(thing, torch.nn.Module):
        for name, value in vars(thing).items():
            if name in REGISTRIES:
                yield from value.items()
            else:
                yield name, value
    elif isinstance(thing, dict):
        yield from ((str(key), value) for key, value in list(thing.items()))
    elif isinstance(thing, CONTAINERS):
        yield from ((str(i), value) for i, value in enumerate(list(thing)))
    elif isinstance(thing, types.MethodType):
        yield "", thing.__self__
    elif isinstance(thing, partial):
        yield from (("", value) for value in (thing.func, thing.args, thing.keywords))
    elif isinstance(thing, types.FunctionType):
        yield from (("", cell.cell_contents) for cell in _cells(thing))
        yield from (("", value) for value in (thing.__defaults__, thing.__kwdefaults__, vars(thing)))
    elif not isinstance(thing, types.BuiltinFunctionType):
        yield from list(getattr(thing, "__dict__", {}).items())
        yield from _slots(thing)


def _cells(function: types.FunctionType) -> list[Any]:
    return [cell for cell in function.__closure__ or () if _filled(cell)]


def _filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _slots(thing: Any) -> Iterator[tuple[str, Any]]:
    fields = getattr(type(thing), "__struct_fields__", None)  # of msgspec
    if fields is not None:
        yield from ((name, getattr(thing, name)) for name in fields)
        return
    for cls in type(thing).__mro__:
        names = cls.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(thing, name):
                yield name, getattr(thing, name)


class Shadow:
    """The copy of ``model``; ``view`` gives the image's part for a live tensor, None where it has none."""

    def __init__(
        self,
        model: torch.nn.Module,
        survey: Survey,
        view: Callable[[torch.Tensor], torch.Tensor | None],
    ) -> None:
        self._survey, self._view = survey, view
        self._copies: dict[int, Any] = {}
        self._pairs: list[tuple[Any, Any, dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        self.model: torch.nn.Module = self._of(model)

    def settle(self) -> None:
        """After a load: bring home what the loader put elsewhere. Raises Unfit for what cannot be copied."""
        for live, copy, before in self._pairs:
            path = self._survey._paths[id(live)]
            now = _scalars(copy)
            for name in sorted(before.keys() | now.keys()):
                if name not in before or name not in now or not _same(before[name], now[name]):
                    raise Unfit(f"{path}.{name} is no tensor and changes with the weights")
            self._settle_slots(path, vars(live), vars(copy))
        for live, copy in self._containers:
            path = self._survey._paths.get(id(live), "")
            if not isinstance(live, dict):
                live, copy = dict(enumerate(live)), dict(enumerate(copy))
            self._settle_slots(path, live, copy)

    def close(self) -> None:
        """Let go of everything without waiting for the collector of cycles, which a server may hold back."""
        for _, copy, _ in self._pairs:
            vars(copy).clear()
        self._pairs.clear()
        self._containers.clear()
        self._copies.clear()
        del self.model

    def _settle_slots(self, path: str, live: dict[Any, Any], copy: dict[Any, Any]) -> None:
        for name in live.keys() | copy.keys():
            old, new = live.get(name), copy.get(name)
            if self._holds_tensors(old) and new is not self._copies.get(id(old)):
                raise Unfit(f"{path}.{name} is not the same container after a second load")
            if isinstance(new, torch.Tensor) and not isinstance(old, torch.Tensor):
                raise Unfit(f"{path}.{name} is a tensor that the live model does not have")
            if not isinstance(old, torch.Tensor) or id(old) not in self._survey.tensors:
                continue
            home = self._view(old)
            if home is None:
                continue
            if not isinstance(new, torch.Tensor) or (new.dtype, new.shape) != (home.dtype, home.shape):
                raise Unfit(f"{path}.{name} has another layout after a second load")
            if (new.device, new.data_ptr(), new.stride()) != (home.device, home.data_ptr(), home.stride()):
                home.copy_(new.detach())

    def _holds_tensors(self, thing: Any) -> bool:
        return isinstance(thing, CONTAINERS) and any(
            isinstance(one, torch.Tensor) and id(one) in self._survey.tensors for _, one in children(thing)
        )

    def _of(self, thing: Any) -> Any:
        key = id(thing)
        if key in self._copies:
            return self._copies[key]
        if isinstance(thing, torch.Tensor):
            return self._tensor(thing) if key in self._survey.tensors else thing
        if isinstance(thing, torch.nn.Module):
            return self._object(thing)
        if key not in self._survey.copied:
            return thing
        if isinstance(thing, CONTAINERS):
            return self._container(thing)
        copy: Any
        if isinstance(thing, types.MethodType):
            copy = types.MethodType(thing.__func__, self._of(thing.__self__))
        elif isinstance(thing, partial):
            args = (self._of(one) for one in thing.args)
            copy = partial(self._of(thing.func), *args, **{k: self._of(v) for k, v in thing.keywords.items()})
        elif isinstance(thing, types.FunctionType):
            return self._function(thing)
        else:
            return self._object(thing)
        self._copies[key] = copy
        return copy

    def _container(self, thing: Any) -> Any:
        if isinstance(thing, dict | list | set | deque):
            copy: Any = _empty(thing)
            self._copies[id(thing)] = copy
            if isinstance(thing, dict):
                copy.update((name, self._of(value)) for name, value in thing.items())
            elif isinstance(thing, set):
                copy.update(map(self._of, thing))
            else:
                copy.extend(map(self._of, thing))
            if not isinstance(thing, set):
                self._containers.append((thing, copy))
            return copy
        items = [self._of(value) for value in thing]
        fixed: Any = type(thing)(*items) if hasattr(thing, "_fields") else type(thing)(items)
        return self._copies.setdefault(id(thing), fixed)

    def _function(self, thing: types.FunctionType) -> Any:
        cells = tuple(types.CellType() for _ in thing.__closure__ or ())
        copy = types.FunctionType(thing.__code__, thing.__globals__, thing.__name__, None, cells)
        self._copies[id(thing)] = copy
        for cell, old in zip(cells, thing.__closure__ or (), strict=True):
            if _filled(old):
                cell.cell_contents = self._of(old.cell_contents)
        copy.__defaults__, copy.__kwdefaults__ = self._of(thing.__defaults__), self._of(thing.__kwdefaults__)
        copy.__dict__.update((name, self._of(value)) for name, value in vars(thing).items())
        return copy

    def _object(self, thing: Any) -> Any:
        is_struct = hasattr(type(thing), "__struct_fields__")
        try:
            copy = shallow(thing) if is_struct else object.__new__(type(thing))
        except TypeError as error:
            path = self._survey._paths[id(thing)]
            raise Unfit(f"{path} leads to weights in a {type(thing).__name__}: {error}") from error
        self._copies[id(thing)] = copy
        self._fill(thing, copy)
        for name, value in _slots(thing):
            if is_struct:
                importlib.import_module("msgspec.structs").force_setattr(copy, name, self._of(value))
            else:
                object.__setattr__(copy, name, self._of(value))
        return copy

    def _tensor(self, live: torch.Tensor) -> Any:
        data = self._view(live)
        if data is None:
            data = live.detach().clone()
        copy = torch.Tensor._make_subclass(type(live), data, live.requires_grad)
        self._copies[id(live)] = copy
        self._fill(live, copy)
        return copy

    def _fill(self, live: Any, copy: Any) -> None:
        attributes = getattr(live, "__dict__", None)
        if attributes is not None:
            self._pairs.append((live, copy, _scalars(live)))
            copy.__dict__.update({name: self._of(value) for name, value in list(attributes.items())})


def _empty(thing: Any) -> Any:
    """A container of the same kind with nothing in it."""
    if type(thing) in (dict, list, set, deque):
        return type(thing)()
    copy = thing.__class__.__new__(thing.__class__)
    if isinstance(thing, dict) and hasattr(thing, "default_factory"):
        copy.default_factory = thing.default_factory
    getattr(copy, "__dict__", {}).update(getattr(thing, "__dict__", {}))
    return copy


def _scalars(thing: Any) -> dict[str, Any]:
    return {
        name: value for name, value in list(getattr(thing, "__dict__", {}).items())
        if isinstance(value, SCALARS)
    }  # fmt: skip


def _same(a: Any, b: Any) -> bool:
    return bool(a == b or (a != a and b != b))
