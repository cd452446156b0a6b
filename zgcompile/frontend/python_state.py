"""A snapshot of the Python state of a step: what changed, putting it back exactly, and a quick check between calls."""

from __future__ import annotations

import builtins
from collections import OrderedDict
from dataclasses import dataclass
from operator import is_
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from zgcompile.errors import PythonStateChanged, SourceLine
from zgcompile.frontend.held_state import (
    ABSENT,
    ATTRIBUTES,
    CLASS,
    LONG,
    LONG_CHECKED,
    MAPPING,
    SEQUENCE,
    SET,
    SLOTS,
    WHOLE,
    AttributesForm,
    ClassForm,
    NamesForm,
    Node,
    OwnAttributesForm,
    brief,
    is_plain,
    same,
)
from zgcompile.frontend.host_random import HostRandom
from zgcompile.frontend.mutation_line import mutation_line
from zgcompile.frontend.reach import MODULE_BOOKKEEPING, MODULE_TABLES, Reached, reachable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

__all__ = [
    "Change",
    "HostRandom",
    "HyperSite",
    "PythonSnapshot",
    "ScalarSite",
    "TensorSite",
    "hyperparameters",
    "reachable",
]

_ADVICE = (
    "a replay runs no Python, so this would freeze: move the line out of the step (return what it needs), or keep the "
    "value in a tensor that the step updates in place"
)


@dataclass(frozen=True, eq=False)
class Change:
    """One difference. `kind`: "value changed", "rebound", "item appended", "items changed", "item added/removed",
    "order changed", "attribute added/removed", "name added/removed" or "advanced" (a random generator). `before` and
    `after` are short reprs; `where` is a guess. `owner` and `key` are the container and the entry (None: the container
    itself)."""

    path: str
    kind: str
    before: str
    after: str
    where: SourceLine | None
    owner: object
    key: object = None

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where is not None else ""
        return f"{self.path}: {self.kind}, {self.before} -> {self.after}{place}"

    def error(self) -> PythonStateChanged:
        what = f"the step changes Python state: {self.path} ({self.kind}, {self.before} -> {self.after})"
        return PythonStateChanged(what, where=self.where, advice=_ADVICE)


@dataclass(frozen=True, slots=True, eq=False)
class ScalarSite:
    """A plain value that the step may read: `container[key]`, through a view that never raises for an attribute or
    cell."""

    path: str
    container: Any
    key: Any
    value: Any


@dataclass(frozen=True, slots=True, eq=False)
class TensorSite:
    """A tensor that the step may read, where it is held."""

    path: str
    container: Any
    key: Any
    tensor: torch.Tensor

    def get(self) -> Any:
        """The object there now, or None: anything but `tensor` itself means that it was rebound."""
        try:
            value = self.container[self.key]
        except (KeyError, IndexError):
            return None
        return None if value is ABSENT else value


@dataclass(frozen=True, slots=True, eq=False)
class HyperSite:
    """A float hyperparameter: `group[key]`, or `group[key][index]` where that is a tuple (betas)."""

    path: str
    group: dict[str, Any]
    key: str
    index: int | None

    def get(self) -> float:
        value = self.group[self.key]
        return value if self.index is None else value[self.index]


def _is_hyper(value: Any) -> bool:
    return type(value) is float or (type(value) in (tuple, list) and any(type(v) is float for v in value))


def hyperparameters(optimizers: Iterable[torch.optim.Optimizer]) -> list[HyperSite]:
    """Every float of every param group, also inside tuples. Ints, bools and None are guards; tensors are
    TensorSites."""
    sites = []
    for number, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                path = f"optimizer{number}.param_groups[{index}][{key!r}]"
                if type(value) is float:
                    sites.append(HyperSite(path, group, key, None))
                elif key != "params" and type(value) in (tuple, list):
                    sites += [HyperSite(f"{path}[{i}]", group, key, i) for i, v in enumerate(value) if type(v) is float]
    return sites


def _identical(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
    return len(a) == len(b) and all(map(is_, a, b)) and all(map(is_, a.values(), b.values()))


def _same_order(a: Iterable[Any], b: Iterable[Any]) -> bool:
    """Whether two equal sets of keys come in one order; the keys need not be the same objects."""
    return all(x is y or (hash(x) == hash(y) and same(x, y)) for x, y in zip(a, b, strict=True))


def _same_whole(node: Node, saved: dict[Any, Any], now: dict[Any, Any]) -> bool:
    before, after = next(iter(saved.values())), next(iter(now.values()))
    if node.form is LONG:
        return set(before) == set(after) if isinstance(node.owner, set) else same(before, after)
    return bool(before == after)


class PythonSnapshot:
    """The state that `take` found. It holds strong references to containers and values, but copies no tensor.

    `tensors`: where each reachable tensor is held (p.grad and the params lists of optimizers are not listed).
    `scalars`: the guards; float hyperparameters are not among them. `reached`: functions, modules, optimizers, objects
    and iterators of the walk.
    """

    def __init__(self, reached: Reached) -> None:
        self.reached = reached
        self.tensors: list[TensorSite] = []
        self.scalars: list[ScalarSite] = []
        self._flat: list[tuple[Any, Any, Any]] = []
        self._named: list[tuple[Node, Any]] = []
        self._sized: list[Any] = []
        self._sizes: list[int] = []
        self._gains: list[Callable[[], tuple[Node, Any] | None] | Node] = []
        self._absent: dict[int, list[tuple[Node, list[str]]]] = {}  # id of a module's globals
        self._tables: list[dict[str, Any]] = []
        self._keys: list[list[str]] = []
        self._table_nodes: list[Node] = []
        self._orders: list[tuple[Callable[[Any], Iterator[Any]], Any, tuple[Any, ...], Node]] = []
        self._longs: list[tuple[Any, tuple[Any, ...], Node]] = []
        self._sets: list[tuple[set[Any], set[Any], Node]] = []
        self._arrays: list[tuple[np.ndarray[Any, Any], bytes, Node]] = []
        self._groups = {id(g) for o in reached.optimizers for g in o.param_groups}
        self._groups |= {
            id(v)
            for o in reached.optimizers
            for g in o.param_groups
            for k, v in g.items()
            if k != "params" and _is_hyper(v)
        }
        self._params = {id(g["params"]) for o in reached.optimizers for g in o.param_groups}
        self._states = {id(d) for o in reached.optimizers for d in (o.state, *o.state.values(), *o.param_groups)}
        for node in reached.nodes:
            self._guard(node)

    @staticmethod
    def take(
        fn: Callable[..., Any],
        extra_roots: Iterable[object] | Mapping[str, object] = (),
        reached: Reached | None = None,
    ) -> PythonSnapshot:
        """The state reachable from `fn` and `extra_roots` now. Runs none of the user's code."""
        return PythonSnapshot(reachable(fn, extra_roots) if reached is None else reached)

    def _quiet(self, node: Node, key: Any) -> bool:
        """Bookkeeping of torch: restored, but never a guard or a change of the user's."""
        if node.quiet:
            return True
        if node.form is not ATTRIBUTES or not isinstance(key, str):
            return False
        if isinstance(node.owner, torch.optim.Optimizer):
            return key.startswith("_")
        return isinstance(node.owner, torch.nn.Module) and key in MODULE_BOOKKEEPING

    def _guard(self, node: Node) -> None:
        form, owner = node.form, node.owner
        if form is SET:
            self._tensors_of_set(node)
            if isinstance(owner, set):
                self._sets.append((owner, set(node.saved), node))
            return
        view = form.view(owner)
        attributes = form in (SLOTS, CLASS) or isinstance(form, AttributesForm)
        self._guard_size(node)
        self._guard_contents(node)
        if isinstance(owner, np.ndarray):
            self._arrays.append((owner, node.saved["contents"], node))
        if not form.keyed:
            return
        hyper, params = id(owner) in self._groups, id(owner) in self._params
        for key, value in node.saved.items():
            if isinstance(value, torch.Tensor) and not params:
                self.tensors.append(TensorSite(node.entry(key), view, key, value))
                continue
            if attributes and not self.reached.reads(owner, key):
                continue
            if self._quiet(node, key) or (hyper and _is_hyper(value)):
                continue
            if value is ABSENT and isinstance(form, NamesForm) and (node.path or hasattr(builtins, key)):
                continue  # few of many names come: the number of names in the module tells
            if node.form is ATTRIBUTES and key in MODULE_TABLES and isinstance(node.owner, torch.nn.Module):
                continue  # torch never replaces them; what they hold is guarded
            if is_plain(value):
                self.scalars.append(ScalarSite(node.origin * (not node.path) + node.entry(key), view, key, value))
            self._flat.append((view, key, value))
            self._named.append((node, key))
        if form is ATTRIBUTES and not isinstance(owner, FunctionType) and not self.reached.reads(owner, ""):
            for key in self._shadows(owner, node.saved):
                self._flat.append((view, key, ABSENT))
                self._named.append((node, key))

    def _guard_size(self, node: Node) -> None:
        """Note the number of entries, and which new ones would be a change: `_gains` has the node where any is, else
        what finds one."""
        form, owner = node.form, node.owner
        if isinstance(form, NamesForm):
            names = [k for k, v in node.saved.items() if v is ABSENT and (node.path or hasattr(builtins, k))]
            if names and id(owner) in self._absent:
                self._absent[id(owner)].append((node, names))
            elif names:
                self._absent[id(owner)] = absent = [(node, names)]
                self._watch(owner, lambda: next(((n, k) for n, names in absent for k in names if k in owner), None))
        elif form is CLASS or isinstance(form, AttributesForm):
            held = vars(owner)
            if form is not CLASS and self.reached.reads(owner, ""):
                self._watch(held, node)
            else:
                self._watch(held, lambda: next(((node, k) for k in held if self._gained(node, k)), None))
        elif form.sized and not node.quiet and not isinstance(owner, tuple):
            self._watch(owner, node)

    def _watch(self, container: Any, gain: Callable[[], tuple[Node, Any] | None] | Node) -> None:
        self._sized.append(container)
        self._sizes.append(len(container))
        self._gains.append(gain)

    def _gained(self, node: Node, key: Any) -> bool:
        if key in node.saved or not self.reached.gains(node.owner, key):
            return False
        if node.form is CLASS:
            return ClassForm.holds(key, vars(node.owner)[key])
        return not isinstance(node.form, OwnAttributesForm) or key not in node.form.kind

    def _guard_contents(self, node: Node) -> None:
        form, owner = node.form, node.owner
        if form is MAPPING and len(node.saved) > 1 and not node.quiet and id(owner) not in self._states:
            kind = OrderedDict if isinstance(owner, OrderedDict) else dict
            if type(owner) is kind and all(type(key) is str for key in node.saved):
                self._tables.append(owner)
                self._keys.append(list(node.saved))
                self._table_nodes.append(node)
            else:
                self._orders.append((kind.__iter__, owner, tuple(node.saved), node))
        elif form is LONG and len(node.saved["contents"]) <= LONG_CHECKED:
            contents = node.saved["contents"]
            if isinstance(owner, set):
                self._sets.append((owner, set(contents), node))
            elif isinstance(owner, dict):
                self._orders.append((dict.__iter__, owner, tuple(key for key, _ in contents), node))
                self._longs.append((owner.values(), tuple(value for _, value in contents), node))
            else:
                self._longs.append((owner, contents, node))

    def _shadows(self, owner: object, saved: dict[Any, Any]) -> Iterator[str]:
        """Attributes of the class that the step reads and that an attribute of the instance would hide."""
        for kind in type(owner).__mro__:
            for key in vars(kind):
                if key not in saved and not key.startswith("__") and self.reached.reads(owner, key):
                    yield key

    def _tensors_of_set(self, node: Node) -> None:
        view = node.form.view(node.owner)
        self.tensors += [TensorSite(node.path, view, v, v) for v in node.saved if isinstance(v, torch.Tensor)]

    def check(self) -> Change | None:
        """The first guard that no longer holds: a plain value, the identity of anything held, the size of a container,
        the order of a dictionary, an attribute or name that the step uses and that was not there.

        Rebound tensors are left to `tensors`. Contents of containers of more than `LONG_CHECKED` numbers and of large
        numpy arrays are not looked at.
        """
        try:
            for view, key, value in self._flat:
                if view[key] is not value and not same(view[key], value):
                    break
            else:
                if [*map(len, self._sized)] == self._sizes or self._resized() is None:
                    return self._content_change()
        except (KeyError, IndexError):
            pass
        return self._first_change()

    def _resized(self) -> Change | None:
        """The first change among the containers whose number of entries did; what nobody reads is remembered."""
        for i, (container, size, gain) in enumerate(zip(self._sized, self._sizes, self._gains, strict=True)):
            if len(container) == size:
                continue
            if isinstance(gain, Node):
                return next(self._changes(gain, gain.form.read(gain.owner)), None)
            found = gain()
            if found is not None:
                node, key = found
                return self._entry_change(node, key, ABSENT, container[key])
            self._sizes[i] = len(container)
        return None

    def _content_change(self) -> Change | None:
        if [*map(list, self._tables)] != self._keys:
            return next(
                self._node_change(n)
                for t, k, n in zip(self._tables, self._keys, self._table_nodes, strict=True)
                if list(t) != k
            )
        for iterate, mapping, keys, node in self._orders:
            if not all(map(is_, iterate(mapping), keys)) and not _same_order(iterate(mapping), keys):
                return self._node_change(node)
        for live, members, node in self._sets:
            if live != members:
                return self._node_change(node)
        for numbers, contents, node in self._longs:
            if not all(map(is_, numbers, contents)) and not all(map(same, numbers, contents)):
                return self._node_change(node)
        for array, bits, node in self._arrays:
            if array.tobytes() != bits:
                return self._node_change(node)
        return None

    def _node_change(self, node: Node) -> Change | None:
        return next(self._changes(node, node.form.read(node.owner)), None)

    def _first_change(self) -> Change | None:
        for (view, key, value), (node, _) in zip(self._flat, self._named, strict=True):
            try:
                now = view[key]
            except (KeyError, IndexError):
                now = ABSENT
            if not same(now, value):
                for change in self._changes(node, node.form.read(node.owner)):
                    if change.key is None or change.key is key:
                        return change
                return self._entry_change(node, key, value, now)
        return self._resized()

    def diff(self, now: PythonSnapshot | None = None) -> list[Change]:
        """Every difference between this snapshot and a later one (None: the present), in the order of the walk."""
        if now is None:
            reads = ((node, node.form.read(node.owner)) for node in self.reached.nodes)
        else:
            later = {(id(n.owner), type(n.form), tuple(n.saved) if n.path == "" else ()): n for n in now.reached.nodes}
            reads = (
                (
                    node,
                    found.saved
                    if found is not None and type(found.form) is type(node.form)
                    else node.form.read(node.owner),
                )
                for node in self.reached.nodes
                for found in [
                    later.get((id(node.owner), type(node.form), tuple(node.saved) if node.path == "" else ()))
                ]
            )
        return [change for node, read in reads for change in self._changes(node, read)]

    def _changes(self, node: Node, now: dict[Any, Any]) -> Iterator[Change]:
        saved = node.saved
        if node.quiet or _identical(saved, now):
            return
        if node.form is WHOLE or node.form is LONG:
            if not _same_whole(node, saved, now):
                yield self._whole_change(node, "advanced" if "state" in saved else "items changed", saved, now)
            return
        if node.form is SET:
            if saved.keys() != now.keys():
                yield self._whole_change(node, "item added" if len(now) > len(saved) else "items changed", saved, now)
            return
        if node.form is SEQUENCE and len(saved) != len(now):
            grown = len(now) > len(saved) and all(same(value, now[key]) for key, value in saved.items())
            yield self._whole_change(node, "item appended" if grown else "items changed", saved, now)
            return
        for key in (*saved, *(k for k in now if k not in saved)):
            before, after = saved.get(key, ABSENT), now.get(key, ABSENT)
            if not same(before, after) and not self._quiet(node, key):
                yield self._entry_change(node, key, before, after)
        if node.form is MAPPING and saved.keys() == now.keys() and not _same_order(saved, now):
            yield self._whole_change(node, "order changed", saved, now)

    def _whole_change(self, node: Node, kind: str, saved: dict[Any, Any], now: dict[Any, Any]) -> Change:
        where = mutation_line(self.reached.functions, node.leaf, None, whole=True)
        if kind == "advanced":
            return Change(node.origin + node.path, kind, "state at capture", "moved on", where, node.owner)
        sizes = [len(s["contents"]) if node.form is LONG else len(s) for s in (saved, now)]
        name = type(node.owner).__name__
        return Change(
            node.origin + node.path, kind, f"{name} of {sizes[0]}", f"{name} of {sizes[1]}", where, node.owner
        )

    def _entry_change(self, node: Node, key: Any, before: Any, after: Any) -> Change:
        noun = "attribute" if node.dotted else "item" if node.path else "name"
        if before is ABSENT:
            kind = f"{noun} added"
        elif after is ABSENT:
            kind = f"{noun} removed"
        else:
            kind = "value changed" if is_plain(before) and is_plain(after) else "rebound"
        path = node.origin * (not node.path) + node.entry(key)
        where = mutation_line(self.reached.functions, node.leaf, key, whole=False)
        return Change(path, kind, brief(before), brief(after), where, node.owner, key)

    def restore(self) -> None:
        """Put every container back exactly as it was: entries, their identity and their order. Tensor data is not
        touched."""
        for node in self.reached.nodes:
            now = node.form.read(node.owner)
            if node.form is WHOLE or node.form is LONG:
                if not _same_whole(node, node.saved, now):
                    node.form.write(node.owner, node.saved)
            elif not _identical(now, node.saved):
                node.form.write(node.owner, node.saved)
