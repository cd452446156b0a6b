"""Random numbers of a step: where its (seed, offset) come from, and the mode that answers random ops from them.

The same mode is on while a step is traced (its key is then an input of the FX graph, and each draw a
zgcompile::keyed_bits node and pointwise ATen) and around the untouched eager function, so both draw the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import is_contiguous_or_false
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from zgcompile.errors import BadInput, CaptureRefused
from zgcompile.ir.demands import demand
from zgcompile.keyed_numbers import (
    bernoulli_from_bits,
    exponential_from_bits,
    integers_from_bits,
    normal_from_bits,
    uniform_from_bits,
)

aten = torch.ops.aten

# Philox offsets are multiples of 4.
_CUDA_ADVANCE = 4
# Arguments that switch a random op off, and the values that do.
_SWITCHES = {"dropout": 0, "dropout_p": 0, "train": False, "training": False}
# Tagged as random though it only chooses a kernel.
_NOT_RANDOM = {aten._fused_sdp_choice}


class DrawStream:
    """Where the (seed, offset) of a step come from: the default generator of its device, and nowhere else.

    So `torch.manual_seed`, `get_rng_state`, `set_rng_state` and a resumed run behave as they do for eager draws. A step
    advances the generator by a fixed amount whatever it draws: CUDA by 4 of its offset, the CPU by one int64.
    """

    def take(self, device: torch.device) -> tuple[int, int]:
        """(seed, offset) of the next step on `device`; the generator moves on."""
        seed, offset = self._next(device)
        if device.type == "cuda":
            _cuda_generator(device).set_offset(offset + _CUDA_ADVANCE)
        return seed, offset

    def peek(self, device: torch.device) -> tuple[int, int]:
        """What the next `take` will return."""
        if device.type == "cuda":
            return self._next(device)
        state = torch.default_generator.get_state()
        try:
            return self._next(device)
        finally:
            torch.default_generator.set_state(state)

    def put_back(self, device: torch.device, offset: int, state: Tensor | None) -> None:
        """Undo a `take` of a step that did not happen; `state` is the CPU generator's from before it."""
        if device.type == "cuda":
            _cuda_generator(device).set_offset(offset)
        elif state is not None:
            torch.default_generator.set_state(state)

    def _next(self, device: torch.device) -> tuple[int, int]:
        if device.type == "cuda":
            generator = _cuda_generator(device)
            return generator.initial_seed(), generator.get_offset()
        # Below every mode: neither a fake tensor nor a keyed number will do.
        with torch._C._DisableTorchDispatch():
            return torch.default_generator.initial_seed(), int(
                torch.empty((), dtype=torch.int64, device="cpu").random_()
            )


def _cuda_generator(device: torch.device) -> torch.Generator:
    torch.cuda.init()
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def refusal(what: str, advice: str) -> Exception:
    """The error for a random op that has no keyed answer."""
    return CaptureRefused(what, advice=advice)


class KeyedDraws(TorchDispatchMode):
    """Answers every random ATen op dispatched inside from zgcompile::keyed_bits.

    `key` is a 0-d int64 tensor (`zgcompile.kernels.keyed_draw.step_key`). Each ATen call that draws takes one ordinal,
    counted from 0 at entry, whatever its sizes. A call that draws nothing takes none: `native_dropout` in evaluation or
    at p = 0 or 1, where eager dropout on the CPU does not draw either. Ops draw on their own device; the key is copied
    there only if it lives elsewhere. What ATen demands of parameters (probabilities in [0, 1]) is demanded here.

    `refuse(what, advice)` makes the exception for a random op without an answer, for a `generator` argument and for a
    draw in the backward pass (activation checkpointing would draw its second forward anew).
    """

    def __init__(self, key: Tensor, *, refuse: Callable[[str, str], Exception] = refusal) -> None:
        super().__init__()
        self.key = key
        self.ordinal = 0
        self._refuse = refuse
        self._empty_dropout = _EmptyDropout(self)

    def __enter__(self) -> KeyedDraws:
        self.ordinal = 0
        self._empty_dropout.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._empty_dropout.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        if _is_composite(func):
            # As under inference mode: the random op is inside. Not `with self`, which starts a new count.
            super().__enter__()
            try:
                return func.decompose(*args, **kwargs)
            finally:
                super().__exit__(None, None, None)
        if not _is_random(func):
            return func(*args, **kwargs)
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        if _is_off(func, named):
            return func(*args, **kwargs)
        if named.pop("generator", None) is not None:
            advice = "leave the argument out; the step draws from the default generator"
            raise self.refused(func, "with a generator of its own cannot be replayed", advice)
        answer = _ANSWERS.get(func.overloadpacket)
        if answer is None or any(argument.is_out or argument.name == "names" for argument in func._schema.arguments):
            raise self.refused(func, "has no keyed random numbers", _advice(func))
        if torch._C._current_graph_task_id() != -1:
            advice = "draw in the forward pass; a step with dropout runs without activation checkpointing"
            raise self.refused(func, "draws random numbers in the backward pass", advice)
        return answer(self, **named)

    def refused(self, func: OpOverload, why: str, advice: str) -> Exception:
        """The exception for `func`."""
        return self._refuse(f"{func} {why}", advice)

    def bits(self, size: Sequence[int], device: torch.device) -> Tensor:
        """int64 `size` on `device`: the bits of the next ordinal. An answer calls this once, or not at all."""
        ordinal, self.ordinal = self.ordinal, self.ordinal + 1
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        key = self.key if self.key.device == device else self.key.to(device)
        return torch.ops.zgcompile.keyed_bits(key, ordinal, size)


class _EmptyDropout(TorchFunctionMode):
    """Keeps the ordinals of eager dropout independent of its size.

    ATen's dropout calls no random op on an input without elements, but a traced dropout draws whatever its size.
    """

    def __init__(self, draws: KeyedDraws) -> None:
        super().__init__()
        self._draws = draws

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            self._count(*args, **kwargs)
        elif func is torch.dropout:
            named = dict(zip(("input", "p", "train"), args, strict=False)) | kwargs
            self._count(named["input"], named["p"], named["train"])
        return func(*args, **kwargs)

    def _count(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> None:
        # dropout_ has the same test for elements when traced, and a symbolic size is not this mode's to decide.
        elements = input.numel()
        if isinstance(elements, int) and elements == 0 and training and 0 < p < 1 and not inplace:
            self._draws.ordinal += 1


@cache
def _is_composite(func: OpOverload) -> bool:
    name = func.name()
    # False of TorchScript's own ops, such as prim::device: the dispatcher does not know them.
    known = torch._C._dispatch_has_kernel(name)
    return known and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


@cache
def _is_random(func: OpOverload) -> bool:
    tagged = torch.Tag.nondeterministic_seeded in func.tags
    return (tagged or func.overloadpacket in _ANSWERS) and func.overloadpacket not in _NOT_RANDOM


def _is_off(func: OpOverload, named: Mapping[str, Any]) -> bool:
    if func.overloadpacket in _ANSWERS:
        return False
    defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
    passed = ((named.get(name, defaults.get(name)), off) for name, off in _SWITCHES.items())
    return any(isinstance(value, (bool, int, float)) and value == off for value, off in passed)


def _advice(func: OpOverload) -> str:
    if "attention" in str(func):
        return "run it under torch.nn.attention.sdpa_kernel(SDPBackend.MATH), or without dropout"
    if "rnn" in str(func):
        return "set its dropout to 0 and put torch.nn.Dropout between the layers"
    return "build it from torch.rand, randn, randint, randperm, bernoulli, multinomial or exponential_"


_Convert = Callable[[Tensor, torch.dtype], Tensor]
_ANSWERS: dict[Any, Callable[..., Any]] = {}


def _answers(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the answer to every overload of the ATen ops `names`; it gets the arguments by their schema names."""

    def register(answer: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            _ANSWERS[getattr(aten, name)] = answer
        return answer

    return register


def _create(
    draws: KeyedDraws,
    convert: _Convert,
    size: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Tensor:
    if layout not in (None, torch.strided):
        raise BadInput(f"no random numbers of layout {layout}")
    values = convert(
        draws.bits(size, torch.device(device or torch._C._get_default_device())), dtype or torch.get_default_dtype()
    )
    return values.pin_memory() if pin_memory else values


def _create_like(
    draws: KeyedDraws,
    convert: _Convert,
    self: Tensor,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    memory_format: torch.memory_format | None = None,
    **options: Any,
) -> Tensor:
    dtype, device = dtype or self.dtype, device or self.device
    values = _create(draws, convert, self.shape, dtype=dtype, device=device, **options)
    if memory_format == torch.contiguous_format or is_contiguous_or_false(self):
        return values
    return torch.empty_like(self, dtype=dtype, device=device, memory_format=memory_format).copy_(values)


def _fill(draws: KeyedDraws, convert: _Convert, self: Tensor) -> Tensor:
    return self.copy_(convert(draws.bits(self.shape, self.device), self.dtype))


def _integers(low: int | Tensor, high: int | Tensor) -> _Convert:
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        demand(torch.as_tensor(low < high).all(), "random integers need from < to")
    elif isinstance(low, torch.SymInt) or isinstance(high, torch.SymInt):
        torch._check(low < high)
    return lambda bits, dtype: integers_from_bits(bits, low, high).to(dtype)


@_answers("rand")
def _rand(draws: KeyedDraws, size: Sequence[int], **options: Any) -> Tensor:
    return _create(draws, uniform_from_bits, size, **options)


@_answers("rand_like")
def _rand_like(draws: KeyedDraws, self: Tensor, **options: Any) -> Tensor:
    return _create_like(draws, uniform_from_bits, self, **options)


@_answers("randn")
def _randn(draws: KeyedDraws, size: Sequence[int], **options: Any) -> Tensor:
    return _create(draws, normal_from_bits, size, **options)


@_answers("randn_like")
def _randn_like(draws: KeyedDraws, self: Tensor, **options: Any) -> Tensor:
    return _create_like(draws, normal_from_bits, self, **options)


@_answers("randint")
def _randint(
    draws: KeyedDraws, high: int, size: Sequence[int], low: int = 0, dtype: torch.dtype | None = None, **options: Any
) -> Tensor:
    return _create(draws, _integers(low, high), size, dtype=dtype or torch.int64, **options)


@_answers("randint_like")
def _randint_like(draws: KeyedDraws, self: Tensor, high: int | Tensor, low: int = 0, **options: Any) -> Tensor:
    return _create_like(draws, _integers(low, high), self, **options)


@_answers("randperm")
def _randperm(draws: KeyedDraws, n: int, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    def convert(bits: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.sort(bits, stable=True).indices.to(dtype)

    return _create(draws, convert, [n], dtype=dtype or torch.int64, **options)


@_answers("random_")
def _random(draws: KeyedDraws, self: Tensor, **bounds: Any) -> Tensor:
    low, high = bounds.get("from", 0), bounds.get("to")
    if high is None:
        high = _end_of(self.dtype)
    return _fill(draws, _integers(low, high), self)


def _end_of(dtype: torch.dtype) -> int:
    """Where the numbers of `Tensor.random_()` end: a float's are the integers that it holds exactly."""
    if dtype == torch.bool:
        return 2
    return round(2 / torch.finfo(dtype).eps) + 1 if dtype.is_floating_point else torch.iinfo(dtype).max + 1


@_answers("uniform_")
def _uniform(draws: KeyedDraws, self: Tensor, **bounds: Any) -> Tensor:
    low, high = bounds.get("from", 0.0), bounds.get("to", 1.0)
    if isinstance(low, float) and isinstance(high, float) and low > high:
        raise BadInput(f"a uniform distribution needs from <= to, not from={low}, to={high}")

    def convert(bits: Tensor, dtype: torch.dtype) -> Tensor:
        unit = uniform_from_bits(bits, dtype)
        if isinstance(low, float) and isinstance(high, float) and (low, high) == (0.0, 1.0):
            return unit
        values = unit * (high - low) + low
        # The sum may round up to `high`, which is outside.
        return torch.where(values < high, values, low)

    return _fill(draws, convert, self)


@_answers("normal_", "normal")
def _normal(
    draws: KeyedDraws,
    mean: float | Tensor = 0.0,
    std: float | Tensor = 1.0,
    self: Tensor | None = None,
    size: Sequence[int] | None = None,
    **options: Any,
) -> Tensor:
    if isinstance(std, float) and std < 0:
        raise BadInput(f"a normal distribution needs std >= 0, not {std}")
    if isinstance(std, Tensor):
        demand((std >= 0).all(), "a normal distribution needs std >= 0")

    def convert(bits: Tensor, dtype: torch.dtype) -> Tensor:
        return (normal_from_bits(bits, dtype) * std + mean).to(dtype)

    if self is not None:
        return _fill(draws, convert, self)
    if size is not None:
        return _create(draws, convert, size, **options)
    shapes = [parameter.shape for parameter in (mean, std) if isinstance(parameter, Tensor)]
    like = mean if isinstance(mean, Tensor) else std
    assert isinstance(like, Tensor)
    return _create(draws, convert, torch.broadcast_shapes(*shapes), dtype=like.dtype, device=like.device)


@_answers("exponential_")
def _exponential(draws: KeyedDraws, self: Tensor, lambd: float = 1.0) -> Tensor:
    if isinstance(lambd, float) and lambd <= 0:
        raise BadInput(f"an exponential distribution needs a rate above 0, not {lambd}")
    return _fill(draws, lambda bits, dtype: exponential_from_bits(bits, dtype) / lambd, self)


def _bernoulli_bits(bits: Tensor, p: float | Tensor) -> Tensor:
    if isinstance(p, Tensor):
        demand(((p >= 0) & (p <= 1)).all(), "bernoulli needs probabilities in [0, 1]")
    elif isinstance(p, (int, float)) and not 0 <= p <= 1:
        raise BadInput(f"bernoulli needs a probability in [0, 1], not {p}")
    return bernoulli_from_bits(bits, p)


@_answers("bernoulli_")
def _bernoulli_in_place(draws: KeyedDraws, self: Tensor, p: float | Tensor = 0.5) -> Tensor:
    return _fill(draws, lambda bits, dtype: _bernoulli_bits(bits, p).to(dtype), self)


@_answers("bernoulli")
def _bernoulli(draws: KeyedDraws, self: Tensor, p: float | Tensor | None = None) -> Tensor:
    probability = self if p is None else p
    return _create_like(draws, lambda bits, dtype: _bernoulli_bits(bits, probability).to(dtype), self)


@_answers("native_dropout")
def _native_dropout(draws: KeyedDraws, input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    if isinstance(p, (int, float)) and p in (0, 1):
        mask = torch.full_like(input, p == 0, dtype=torch.bool)
        return input * mask, mask
    # Composite dropout on the CPU draws bernoulli_(1 - p): the same bits against the same number.
    mask = _create_like(
        draws, lambda bits, _: bernoulli_from_bits(bits, 1 - p), input, dtype=torch.bool, device=input.device
    )
    return input * mask * (1 / (1 - p)), mask


@_answers("multinomial")
def _multinomial(draws: KeyedDraws, self: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
    weights = self.to(torch.float64)
    demand((weights.isfinite() & (weights >= 0)).all(), "multinomial needs weights that are finite and at least 0")
    demand((weights.sum(-1) > 0).all(), "multinomial needs a weight above 0 in every distribution")
    if not replacement:
        # The order of arrivals at rates `weights` is that of successive draws (Efraimidis and Spirakis, 2006).
        arrivals = exponential_from_bits(draws.bits(self.shape, self.device), torch.float64) / weights
        return torch.topk(arrivals, num_samples, dim=-1, largest=False).indices
    cumulative = weights.cumsum(-1)
    uniform = uniform_from_bits(draws.bits([*self.shape[:-1], num_samples], self.device), torch.float64)
    # uniform * total stays below total, so `right` never finds a category of weight 0; the clamp is for bad weights.
    found = torch.searchsorted(cumulative, uniform * cumulative[..., -1:], right=True)
    return found.clamp(max=self.shape[-1] - 1)
