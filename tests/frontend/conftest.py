"""What the tests of whole steps share: a tiny world, an image of everything that must not change, and the comparison
with
the untouched eager function."""

from __future__ import annotations

import contextlib
import inspect
import math
import numbers
import random
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zgcompile
from zgcompile.errors import SourceLine, ZgError
from zgcompile.frontend.undo import Undo
from zgcompile.testing import injected_draws

NODES, FEATURES, CLASSES = 40, 5, 3
SEED = 7


class World:
    """A tiny input graph (some nodes isolated), a model and an optimizer: the same ones for each new world."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        degree = torch.randint(0, 7, (NODES,), generator=generator)
        degree[[0, 1, NODES - 1]] = 0
        self.indptr = torch.zeros(NODES + 1, dtype=torch.int64)
        self.indptr[1:] = degree.cumsum(0)
        self.indices = torch.randint(0, NODES, (int(self.indptr[-1]),), generator=generator)
        self.x = torch.randn(NODES, FEATURES, generator=generator)
        self.y = torch.randint(0, CLASSES, (NODES,), generator=generator)
        self.visits = torch.zeros(NODES)
        self.model = nn.Linear(FEATURES, CLASSES)
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
        self.opt: Any = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.n = 0

    def neighbours(self, seeds: Tensor) -> tuple[Tensor, Tensor]:
        """All (row, neighbour) pairs of the seeds."""
        start = self.indptr[seeds]
        degree = self.indptr[seeds + 1] - start
        row = torch.repeat_interleave(torch.arange(seeds.numel()), degree)
        offset = torch.arange(row.numel()) - (degree.cumsum(0) - degree)[row]
        return row, self.indices[start[row] + offset]

    def loss(self, seeds: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(self.x[seeds]), self.y[seeds])

    def train(self, loss: Tensor) -> None:
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()


def _image(value: Any, seen: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        grad = value.grad if value.is_leaf else None
        kept = value.detach()
        if kept.device.type == "meta" or type(kept) not in (Tensor, nn.Parameter):
            return type(value).__name__, id(value), tuple(value.shape)
        data = (
            kept.clone().view(-1).view(torch.uint8).numpy().tobytes()
            if kept.layout is torch.strided and kept.numel()
            else b""
        )
        return "tensor", id(value), tuple(value.shape), value.dtype, data, _image(grad, seen)
    if isinstance(value, (int, float, str, bytes, bool, type(None), ModuleType, type)):
        return ("value", type(value).__name__, str(value))
    if id(value) in seen:
        return "seen", id(value)
    seen[id(value)] = value
    if isinstance(value, (list, tuple)):
        return type(value).__name__, id(value), [_image(v, seen) for v in value]
    if isinstance(value, dict):
        return "dict", id(value), [(id(k) if isinstance(k, Tensor) else k, _image(v, seen)) for k, v in value.items()]
    if isinstance(value, FunctionType):
        cells = [_image(c.cell_contents, seen) for c in value.__closure__ or ()]
        space = {k: v for k, v in value.__globals__.items() if k in value.__code__.co_names}
        return "function", id(value), cells, [(k, _image(v, seen)) for k, v in space.items()]
    if hasattr(value, "__dict__"):
        return type(value).__name__, id(value), [(k, _image(v, seen)) for k, v in vars(value).items()]
    return type(value).__name__, id(value)


def image(*values: Any) -> Any:
    """All that a step may reach from `values`, by value and by identity, and the state of every generator."""
    seen: dict[int, Any] = {}
    spaces = []
    for v in values:
        if isinstance(v, FunctionType):
            space = {k: v.__globals__[k] for k in v.__code__.co_names if k in v.__globals__}
            spaces.append([(k, _image(s, seen)) for k, s in space.items() if not isinstance(s, FunctionType)])
            spaces.append([_image(c.cell_contents, seen) for c in v.__closure__ or ()])
        else:
            spaces.append(_image(v, seen))
    numpy_state = np.random.get_state()
    return spaces, generators(), str(numpy_state)


def generators() -> Any:
    return random.getstate(), torch.get_rng_state().tolist()


@pytest.fixture(scope="session")
def take_image() -> Callable[..., Any]:
    return image


@pytest.fixture(scope="session")
def new_world() -> Callable[[], World]:
    return World


@pytest.fixture
def world() -> World:
    torch.manual_seed(SEED)
    return World()


def marked(fn: Any) -> tuple[str, int]:
    """(file, line) of the line of `fn` that ends with `# HERE`."""
    lines, first = inspect.getsourcelines(fn)
    (at,) = [i for i, line in enumerate(lines) if line.rstrip().endswith("# HERE")]
    return inspect.getsourcefile(fn) or "", first + at


@pytest.fixture(scope="session")
def check_refused() -> Callable[..., ZgError]:
    """`check_refused(step, *args, roots=[...])`: the compiled step refuses these arguments, at the marked line, and
    nothing is changed."""

    def check(
        step: Any,
        *args: Any,
        roots: Sequence[Any] = (),
        kind: type[ZgError] = ZgError,
        line: int | None = None,
        source: Any = None,
        **kwargs: Any,
    ) -> ZgError:
        compiled = step if isinstance(step, zgcompile.CompiledStep) else zgcompile.compile(step, warmup=1)
        before = image(compiled.fn, *roots)
        with pytest.raises(ZgError) as caught:
            compiled(*args, **kwargs)
        after = image(compiled.fn, *roots)
        assert before == after, "the refusal changed something"
        error = caught.value
        assert isinstance(error, kind), error
        assert isinstance(error.where, SourceLine), f"no line: {error}"
        if line is None:
            file, line = marked(source or compiled.fn)
            assert error.where.file.rsplit("/", 1)[-1] == file.rsplit("/", 1)[-1], error
        assert error.where.line == line, f"marked line {line}: {error}"
        assert error.advice, f"no advice: {error}"
        assert f"{error.where.file}:{line}" in str(error)
        return error

    return check


# -- the oracle


def plain(value: Any) -> Any:
    """A returned value as something that compares: clones of tensors, numbers read."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(*map(plain, value)) if hasattr(value, "_fields") else type(value)(map(plain, value))
    return value


def state_of(*holders: Any) -> dict[str, Any]:
    """Parameters, buffers, gradients and optimizer state, in a comparable form without identities."""
    found: dict[str, Any] = {}
    for at, holder in enumerate(holders):
        if isinstance(holder, World):
            found |= {f"{at}.{k}": v for k, v in state_of(holder.model, holder.opt, holder.visits, holder.x).items()}
        elif isinstance(holder, nn.Module):
            for name, p in holder.named_parameters(remove_duplicate=False):
                found[f"{at}.{name}"], found[f"{at}.{name}.grad"] = plain(p), plain(p.grad)
            for name, b in holder.named_buffers():
                found[f"{at}.{name}"] = plain(b)
        elif isinstance(holder, torch.optim.Optimizer):
            found |= {f"{at}.{g}.{k}": plain(v) for g, s in holder.state_dict()["state"].items() for k, v in s.items()}
        elif isinstance(holder, Tensor):
            found[f"{at}"], found[f"{at}.grad"] = plain(holder), plain(holder.grad) if holder.is_leaf else None
        elif isinstance(holder, (list, tuple)):
            found |= {f"{at}.{k}": v for k, v in state_of(*holder).items()}
        else:
            found[f"{at}"] = plain(holder)
    return found


def assert_same(got: Any, want: Any, what: str, tolerance: float = 1e-5) -> None:
    if isinstance(want, Tensor):
        assert isinstance(got, Tensor), f"{what}: {type(got).__name__} instead of a tensor"
        assert got.dtype == want.dtype and got.shape == want.shape, (
            f"{what}: {got.dtype}{list(got.shape)}, not {want.dtype}{list(want.shape)}"
        )
        if want.dtype.is_floating_point:
            assert torch.allclose(got, want, rtol=tolerance, atol=tolerance, equal_nan=True), (
                f"{what}: {got} instead of {want}"
            )
        else:
            assert torch.equal(got, want), f"{what}: {got} instead of {want}"
    elif isinstance(want, dict):
        assert isinstance(got, dict) and got.keys() == want.keys(), (
            f"{what}: keys {sorted(map(str, got))} instead of {sorted(map(str, want))}"
        )
        for key in want:
            assert_same(got[key], want[key], f"{what}[{key}]", tolerance)
    elif isinstance(want, (list, tuple)):
        assert type(got) is type(want) and len(got) == len(want), f"{what}: {got} instead of {want}"
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_same(a, b, f"{what}[{i}]", tolerance)
    elif isinstance(want, float):
        assert isinstance(got, numbers.Real), f"{what}: {type(got).__name__}"
        assert math.isclose(float(got), want, rel_tol=tolerance, abs_tol=tolerance) or (
            want != want and float(got) != float(got)
        ), f"{what}: {got} instead of {want}"
    else:
        assert got == want, f"{what}: {got} instead of {want}"


def run(step: Any, batches: Sequence[Any], holders: Sequence[Any], between: Any, guard: Callable[[], Any]) -> list[Any]:
    """After each call: (output or exception, state, generators)."""
    torch.manual_seed(SEED)
    record = []
    for i, batch in enumerate(batches):
        if between is not None:
            between(i, *holders)
        compiled = isinstance(step, zgcompile.CompiledStep)
        undo = None if compiled else Undo(step, holders, [], [])
        try:
            with guard():
                out: Any = step(*batch) if isinstance(batch, tuple) else step(batch)
            record.append((plain(out), state_of(*holders), generators()))
        except (ZgError, IndexError, ValueError, RuntimeError) as error:
            if undo is not None:
                undo.restore()
            record.append((error, state_of(*holders), generators()))
    return record


@pytest.fixture(scope="session")
def compare() -> Callable[..., zgcompile.CompiledStep]:
    """`compare(build, batches)`: `build()` gives (step, *holders) twice; the compiled step must do what the eager
    one does under
    injected draws, after each call: outputs, state, gradients, generators; where eager raises, a ZgError and nothing
    changed.
    `between(i, *holders)` runs before call i in both worlds."""

    def check(
        build: Callable[[], Sequence[Any]],
        batches: Sequence[Any],
        between: Any = None,
        tolerance: float = 1e-5,
        **options: Any,
    ) -> zgcompile.CompiledStep:
        step, *holders = build()
        want = run(step, batches, holders, between, injected_draws)
        step, *holders = build()
        compiled = zgcompile.compile(step, **{"warmup": 1, **options})
        got = run(compiled, batches, holders, between, contextlib.nullcontext)
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            if isinstance(b[0], Exception):
                assert isinstance(a[0], ZgError), f"call {i}: eager raises {b[0]!r}, compiled gave {a[0]!r}"
            else:
                if isinstance(a[0], Exception):
                    raise AssertionError(f"call {i} raised {a[0]!r}") from a[0]
                assert_same(a[0], b[0], f"call {i}, output", tolerance)
            assert_same(a[1], b[1], f"call {i}, state", tolerance)
            assert a[2] == b[2], f"call {i}: generators differ"
        return compiled

    return check


@pytest.fixture(scope="session")
def batches_of() -> Callable[..., list[Tensor]]:
    """`batches_of(8, 8, 3)`: random seeds of these lengths."""

    def make(*lengths: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(5)
        return [torch.randperm(NODES, generator=generator)[:n] for n in lengths]

    return make
