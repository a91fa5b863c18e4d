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
from collections.abc import Callable, Mapping
from copy import copy as shallow
from functools import partial
from typing import Any

import torch

from .survey import CONTAINERS, SCALARS, Survey, Unfit, children, filled, slots


class Shadow:
    """The copy of ``model`` as ``survey`` found it, whatever forward passes do to it meanwhile.

    ``view`` gives the image's part for a live tensor, None where it has none.
    """

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
            path = self._survey.path(live)
            now = _scalars(vars(copy))
            for name in sorted(before.keys() | now.keys()):
                if name not in before or name not in now or not _same(before[name], now[name]):
                    raise Unfit(f"{path}.{name} is no tensor and changes with the weights")
            self._settle_slots(path, self._survey.held(live), vars(copy))
        for live, copy in self._containers:
            items = copy if isinstance(live, dict) else dict(enumerate(copy))
            self._settle_slots(self._survey.path(live), self._survey.held(live), items)

    def close(self) -> None:
        """Let go of everything without waiting for the collector of cycles, which a server may hold back."""
        for _, copy, _ in self._pairs:
            vars(copy).clear()
        self._pairs.clear()
        self._containers.clear()
        self._copies.clear()
        del self.model

    def _settle_slots(self, path: str, live: Mapping[Any, Any], copy: Mapping[Any, Any]) -> None:
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
            isinstance(one, torch.Tensor) and id(one) in self._survey.tensors
            for _, one in children(thing, self._survey.held(thing))
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
        held = self._survey.held(thing)
        if isinstance(thing, dict | list | set | deque):
            copy: Any = _empty(thing)
            self._copies[id(thing)] = copy
            if isinstance(thing, dict):
                copy.update((name, self._of(value)) for name, value in held.items())
            elif isinstance(thing, set):
                copy.update(map(self._of, held.values()))
            else:
                copy.extend(map(self._of, held.values()))
            if not isinstance(thing, set):
                self._containers.append((thing, copy))
            return copy
        items = [self._of(value) for value in held.values()]
        fixed: Any = type(thing)(*items) if hasattr(thing, "_fields") else type(thing)(items)
        return self._copies.setdefault(id(thing), fixed)

    def _function(self, thing: types.FunctionType) -> Any:
        cells = tuple(types.CellType() for _ in thing.__closure__ or ())
        copy = types.FunctionType(thing.__code__, thing.__globals__, thing.__name__, None, cells)
        self._copies[id(thing)] = copy
        for cell, old in zip(cells, thing.__closure__ or (), strict=True):
            if filled(old):
                cell.cell_contents = self._of(old.cell_contents)
        copy.__defaults__, copy.__kwdefaults__ = self._of(thing.__defaults__), self._of(thing.__kwdefaults__)
        copy.__dict__.update((name, self._of(value)) for name, value in vars(thing).items())
        return copy

    def _object(self, thing: Any) -> Any:
        is_struct = hasattr(type(thing), "__struct_fields__")
        try:
            copy = shallow(thing) if is_struct else object.__new__(type(thing))
        except TypeError as error:
            path = self._survey.path(thing)
            raise Unfit(f"{path} leads to weights in a {type(thing).__name__}: {error}") from error
        self._copies[id(thing)] = copy
        self._fill(thing, copy)
        for name, value in slots(thing):
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
        if hasattr(live, "__dict__"):
            held = self._survey.held(live)
            self._pairs.append((live, copy, _scalars(held)))
            copy.__dict__.update({name: self._of(value) for name, value in held.items()})


def _empty(thing: Any) -> Any:
    """A container of the same kind with nothing in it."""
    if type(thing) in (dict, list, set, deque):
        return type(thing)()
    copy = thing.__class__.__new__(thing.__class__)
    if isinstance(thing, dict) and hasattr(thing, "default_factory"):
        copy.default_factory = thing.default_factory
    getattr(copy, "__dict__", {}).update(getattr(thing, "__dict__", {}))
    return copy


def _scalars(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if isinstance(value, SCALARS)}


def _same(a: Any, b: Any) -> bool:
    return bool(a == b or (a != a and b != b))
