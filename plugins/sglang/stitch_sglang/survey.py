"""What there is in a live model after its load, and what forward passes put into it later.

A cache of weights that a forward pass makes is of the weights that it found. So what was not there after the
load is dropped when other weights come: the next pass makes it anew.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from operator import is_
from typing import Any

import torch

from .image import storage_key

CONTAINERS = (dict, list, tuple, set, frozenset, deque)
SCALARS = (bool, int, float, complex, str, bytes, type(None))
REGISTRIES = ("_parameters", "_buffers", "_modules")
OWN_OBJECTS = ("quant_method", "scheme")
"""Attributes of modules whose objects are always copied: post-processing may keep things in them."""

_LEAVES = (*SCALARS, type, types.ModuleType, torch.dtype, torch.device)
_OF_TORCH = frozenset(vars(torch.nn.Module())) - frozenset(REGISTRIES)

INDICES = frozenset((
    torch.bool, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64
))  # fmt: skip
"""Types of tensors that forward passes make to count and to index with: taken for no copies of weights."""

MANY = 10_000
"""So many things behind one attribute are the engine's, not a cache: no need to look at all of them."""


class Unfit(Exception):
    """The model, or a version of it, cannot be staged this way; the message names what of it."""


@dataclass(frozen=True)
class Found:
    """``required``: a parameter or persistent buffer."""

    path: str
    tensor: torch.Tensor
    required: bool


@dataclass(frozen=True)
class _Watched:
    """``part``: the id of the module that it belongs to."""

    thing: Any
    path: str
    part: int


class Survey:
    """What of a live model there is to copy; to be made when it is loaded and nothing ran since.

    ``constants``: patterns of paths that forward passes may add to, since it is not of weights.
    """

    def __init__(self, model: torch.nn.Module, constants: Sequence[str] = ()) -> None:
        self._model, self._constants = model, tuple(constants)
        self._parents: dict[int, list[int]] = {}
        self._things: dict[int, Any] = {}  # keeps what the ids stand for
        self._held: dict[int, dict[Any, Any]] = {}
        self._module: dict[int, int] = {}
        self._paths: dict[int, str] = {}
        self._required: set[int] = set()
        self.copied: set[int] = set()
        """Ids of plain things that must be copied."""
        self._walk(model)
        modules = {key for key, thing in self._things.items() if isinstance(thing, torch.nn.Module)}
        self.copied |= self._leading_to(modules | self._required)
        self.tensors = {
            key: Found(self._paths[key], thing, key in self._required)
            for key, thing in self._things.items()
            if isinstance(thing, torch.Tensor) and self._counts(key)
        }
        """By id."""
        tensors = {key: one for key, one in self._things.items() if isinstance(one, torch.Tensor)}
        self._places = {key: _place(one) for key, one in tensors.items()}
        self._storages = {storage_key(one) for one in tensors.values()} - {None}
        self._watched = self._watch()

    def path(self, thing: Any) -> str:
        return self._paths.get(id(thing), "")

    def held(self, thing: Any) -> dict[Any, Any]:
        """The attributes or items that a thing had when the survey was made."""
        return self._held.get(id(thing), {})

    # ------------------------------------------------------------------------ what forward passes made

    def made(self) -> list[str]:
        """Paths of tensors, not those of indices, that came to the model since, in parts that reach weights.

        A part is a module with its containers and with the objects that only it has. One that reaches no
        parameter and no persistent buffer, itself or through submodules, cannot make a cache of weights.
        """
        return [path for path, _ in self._made(self._changed())]

    def drop(self) -> list[str]:
        """Put every part in which something was made back to what it held; the paths of what was made.

        Of the other parts only what is true or false: it may say that something was made.
        """
        changed = self._changed()
        made = self._made(changed)
        parts = {part for _, part in made}
        for one in changed if made else ():
            self._put_back(one, flags_only=one.part not in parts)
        return [path for path, _ in made]

    def moved(self, later: Survey | None = None) -> list[str]:
        """Paths of parameters and persistent buffers that lie elsewhere now.

        With ``later``: of all tensors of the model that it found elsewhere, or not at all.
        """
        if later is None:
            required = ((key, self.tensors[key]) for key in self._required)
            return [one.path for key, one in required if _place(one.tensor) != self._places[key]]
        places = {one.path: _place(one.tensor) for one in later.tensors.values()}
        return [one.path for key, one in self.tensors.items() if places.get(one.path) != self._places[key]]

    def _changed(self) -> list[_Watched]:
        found = []
        for one in self._watched:
            now, before = _contents(one.thing), self._held[id(one.thing)]
            if now.keys() != before.keys() or not all(map(is_, now.values(), before.values())):
                found.append(one)
        return found

    def _made(self, changed: list[_Watched]) -> list[tuple[str, int]]:
        found = []
        for one in changed:
            before = self._held[id(one.thing)]
            for name, value in _contents(one.thing).items():
                path = _join(one.path, str(name))
                is_other = value is not before.get(name, before)
                if is_other and self._is_new(value) and not self._is_constant(path):
                    found.append((path, one.part))
        return found

    def _put_back(self, one: _Watched, flags_only: bool) -> None:
        thing, before = one.thing, self._held[id(one.thing)]
        if isinstance(thing, list | set | deque):
            if not flags_only:
                _refill(thing, before.values())
            return
        items = thing if isinstance(thing, dict) else vars(thing)
        for name in list(items.keys() | before.keys()):
            now, old = items.get(name), before.get(name)
            if self._is_constant(_join(one.path, str(name))) or (flags_only and not _are_flags(now, old)):
                continue
            if name in before:
                items[name] = old
            else:
                del items[name]

    def _is_new(self, value: Any) -> bool:
        """Whether it leads to a tensor that was not there, in memory of its own, that may be of weights."""
        seen: set[int] = set()
        todo = [value]
        while todo and len(seen) < MANY:
            thing = todo.pop()
            if isinstance(thing, _LEAVES) or id(thing) in seen or id(thing) in self._things:
                continue
            seen.add(id(thing))
            if isinstance(thing, torch.Tensor) and self._may_be_of_weights(thing):
                return True
            todo.extend(child for _, child in children(thing, _contents(thing)))
        return bool(todo)

    def _may_be_of_weights(self, tensor: torch.Tensor) -> bool:
        has_values = tensor.numel() > 0 and not tensor.is_meta and tensor.dtype not in INDICES
        return has_values and storage_key(tensor) not in self._storages

    def _is_constant(self, path: str) -> bool:
        return any(fnmatchcase(path, pattern) for pattern in self._constants)

    def _watch(self) -> list[_Watched]:
        """Of each module that reaches weights: what is its own, and can be changed."""
        reach = self._leading_to(self._required)
        owner = {id(one): id(one) for one in self._model.modules()}
        todo = deque(self._model.modules())
        watched = []
        while todo:
            thing: Any = todo.popleft()
            part = owner[id(thing)]
            if part in reach and not isinstance(thing, tuple | frozenset):
                watched.append(_Watched(thing, self._paths[id(thing)], part))
            for child in self._own(thing):
                if id(child) in owner or id(child) not in self._things:
                    continue
                modules = {self._module[parent] for parent in self._parents[id(child)]}
                if len(modules) == 1 or isinstance(child, (*CONTAINERS, torch.Tensor)) or id(child) in reach:
                    owner[id(child)] = part
                    todo.append(child)
        return watched

    def _own(self, thing: Any) -> Iterator[Any]:
        """What may be a part of it."""
        held = self.held(thing)
        if isinstance(thing, torch.nn.Module):
            yield from (value for name, value in held.items() if name not in _OF_TORCH)
        elif not isinstance(thing, types.FunctionType | types.MethodType | partial):
            yield from (value for _, value in children(thing, held))

    # ----------------------------------------------------------------------------------------- the walk

    def _walk(self, model: torch.nn.Module) -> None:
        self._paths[id(model)], self._parents[id(model)], self._module[id(model)] = "", [], id(model)
        todo = deque([model])
        while todo:
            thing: Any = todo.popleft()
            key, path = id(thing), self._paths[id(thing)]
            if key in self._things:
                continue
            self._things[key] = thing
            contents = self._held[key] = _contents(thing)
            if isinstance(thing, torch.nn.Module):
                self._module[key] = key
                self._note_module(thing)
            for name, child in children(thing, contents):
                if isinstance(child, _LEAVES):
                    continue
                self._parents.setdefault(id(child), []).append(key)
                self._module.setdefault(id(child), self._module[key])
                self._paths.setdefault(id(child), _join(path, name))
                todo.append(child)

    def _note_module(self, module: torch.nn.Module) -> None:
        temporary = module._non_persistent_buffers_set
        self._required.update(id(one) for one in module._parameters.values() if one is not None)
        self._required.update(
            id(one) for name, one in module._buffers.items() if one is not None and name not in temporary
        )
        for name, value in self.held(module).items():
            if isinstance(value, CONTAINERS) or (name in OWN_OBJECTS and value is not None):
                self.copied.add(id(value))
            if name in REGISTRIES:
                key = id(value)
                self._things[key], self._held[key] = value, dict(value)
                self._paths[key], self._parents[key] = self._paths[id(module)], [id(module)]
                self._module[key] = id(module)

    def _leading_to(self, keys: set[int]) -> set[int]:
        """Ids of all from which one of ``keys`` is reached, without these unless they lead to another."""
        todo = list(keys)
        done: set[int] = set()
        while todo:
            for parent in self._parents[todo.pop()]:
                if parent not in done:
                    done.add(parent)
                    todo.append(parent)
        return done

    def _counts(self, key: int) -> bool:
        """Whether a tensor belongs to the model, rather than to something that the model only knows."""
        return key in self._required or any(
            parent in self.copied or isinstance(self._things[parent], (torch.nn.Module, torch.Tensor))
            for parent in self._parents[key]
        )


def children(thing: Any, contents: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """What it refers to, with a name where it has one. ``contents``: see ``_contents``."""
    if isinstance(thing, torch.nn.Module):
        for name, value in contents.items():
            if name in REGISTRIES:
                yield from list(value.items())
            else:
                yield name, value
    elif isinstance(thing, CONTAINERS):
        yield from ((str(name), value) for name, value in contents.items())
    elif isinstance(thing, types.MethodType):
        yield "", thing.__self__
    elif isinstance(thing, partial):
        yield from (("", value) for value in (thing.func, thing.args, thing.keywords))
    elif isinstance(thing, types.FunctionType):
        yield from (("", cell.cell_contents) for cell in thing.__closure__ or () if filled(cell))
        yield from (("", value) for value in (thing.__defaults__, thing.__kwdefaults__, vars(thing)))
    elif not isinstance(thing, types.BuiltinFunctionType):
        yield from contents.items()
        yield from slots(thing)


def filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def slots(thing: Any) -> Iterator[tuple[str, Any]]:
    """Attributes that are in no ``__dict__``."""
    fields = getattr(type(thing), "__struct_fields__", None)  # of msgspec
    if fields is not None:
        yield from ((name, getattr(thing, name)) for name in fields)
        return
    for cls in type(thing).__mro__:
        names = cls.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(thing, name):
                yield name, getattr(thing, name)


def bump(tensors: Iterable[torch.Tensor]) -> None:
    """Let caches that are keyed by ``_version`` see that these were written.

    A copy past torch, or by way of ``.data``, does not count. Tensors of inference mode have no counter.
    """
    torch.autograd.graph.increment_version([one for one in tensors if not one.is_inference()])


def _contents(thing: Any) -> dict[Any, Any]:
    """Its items, those of sequences by their position, or its attributes; a copy, made at one moment."""
    if isinstance(thing, dict):
        return dict(thing)
    if isinstance(thing, CONTAINERS):
        return dict(enumerate(list(thing)))
    return dict(getattr(thing, "__dict__", ()))


def _refill(thing: list[Any] | set[Any] | deque[Any], items: Iterable[Any]) -> None:
    thing.clear()
    if isinstance(thing, set):
        thing.update(items)
    else:
        thing.extend(items)


def _are_flags(*values: Any) -> bool:
    return any(isinstance(value, bool) for value in values) and all(
        isinstance(value, bool | None) for value in values
    )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout != torch.strided:
        return ()
    return storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()
