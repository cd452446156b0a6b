"""Stage one of a capture: one make_fx trace of the whole step, every outside tensor an input."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._pytree import TreeSpec, tree_flatten

from zgcompile.errors import CaptureRefused, SourceLine
from zgcompile.frontend.arguments import Arguments
from zgcompile.frontend.discovery import CreatedState, Discovery
from zgcompile.frontend.lift import LiftMode, fake_twin, lifted_autograd_functions
from zgcompile.frontend.python_state import HyperSite
from zgcompile.frontend.shape_env import EnvelopeShapeEnv
from zgcompile.ir.draws import KeyedDraws
from zgcompile.ir.program import LiftedInput
from zgcompile.ir.sizes import SYMBOLIC
from zgcompile.ir.source import is_user_file, user_line_from_stack_trace


@dataclass
class Traced:
    """A stage-one FX graph. Its outputs are the user's leaves, then one gradient for each entry of `gradients`."""

    fx_graph: GraphModule
    shape_env: EnvelopeShapeEnv
    fake_mode: FakeTensorMode
    inputs: list[Any]
    lifted: list[LiftedInput]
    hypers: list[HyperSite]
    out_spec: TreeSpec
    user_outputs: int
    constants: dict[int, Any]  # user output leaves that are plain Python values
    gradients: list[
        tuple[int, str]
    ]  # lifted index of the parameter; "none", "new", or "same" (the tensor it was, perhaps written)
    entered: frozenset[int] = frozenset()  # lifted indices of the parameters that had a gradient when the step began
    looked_at: frozenset[int] = frozenset()  # of these, those whose gradient some Python code looked at before it went


@dataclass
class TraceRequest:
    """What a trace needs: the copied function, one call's arguments, and what the discovery found."""

    run: Callable[..., Any]
    arguments: Arguments
    groups: Sequence[int | None]
    found: Discovery
    hypers: Sequence[HyperSite]
    names: dict[int, str]
    device: torch.device
    modes: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    rows: Sequence[int] = field(default_factory=list)  # rows of the fake buffer, one for each length group
    as_found: bool = False  # a gradient that is None now is None in the trace, though the step leaves one


def trace(request: TraceRequest) -> Traced:
    """Trace `request.run` once. The caller restores the Python state afterwards."""
    shape_env = EnvelopeShapeEnv()
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shape_env)
    lift = LiftMode(fake_mode)
    lifted: list[LiftedInput] = []
    twins: list[FakeTensor] = []
    created = {(id(c.parameter), c.key): c for c in request.found.created}

    def add(tensor_id: int | None, twin: FakeTensor, entry: LiftedInput) -> None:
        if tensor_id is not None:
            lift.twins[tensor_id] = twin
        twins.append(twin)
        lifted.append(entry)

    owners = {id(t.grad): t for t in request.found.tensors if t.is_leaf and t.grad is not None}
    held = _held_state(request.found.optimizers)
    for number, tensor in enumerate(request.found.tensors):
        owner = owners.get(id(tensor))
        if id(tensor) in held:
            optimizer, parameter, item = held[id(tensor)]
            name = f"{request.names.get(id(parameter), 'parameter')}.{item}"
            add(
                id(tensor), fake_twin(fake_mode, tensor), LiftedInput(name, _state(optimizer, parameter, item), "state")
            )
        elif owner is None:
            name = request.names.get(id(tensor), f"tensor{number}")
            add(id(tensor), fake_twin(fake_mode, tensor), LiftedInput(name, _constant(tensor), "tensor"))
        else:
            name = f"{request.names.get(id(owner), 'parameter')}.grad"
            add(id(tensor), fake_twin(fake_mode, tensor), LiftedInput(name, _grad(owner), "grad"))
    for state in created.values():
        on_device = state.like.dim() or request.device.type == "cpu"
        twin = _fake_like(fake_mode, state.like, state.like.device if on_device else request.device)
        prefix = request.names.get(id(state.parameter), "parameter")
        add(
            None,
            twin,
            LiftedInput(f"{prefix}.{state.key}", _state(state.optimizer, state.parameter, state.key), "state"),
        )
    state_twins = dict(zip(created, twins[len(request.found.tensors) :], strict=True))
    begins_with = request.found.grads_before if request.as_found else request.found.grads_after
    for tensor in request.found.tensors:
        if not begins_with.get(id(tensor)):
            continue
        parameter = lift.twins[id(tensor)]
        if tensor.grad is not None and id(tensor.grad) in lift.twins:
            parameter.grad = lift.twins[id(tensor.grad)]
        else:
            name = f"{request.names.get(id(tensor), 'parameter')}.grad"
            add(None, _fake_like(fake_mode, parameter), LiftedInput(name, _grad(tensor), "grad"))
            parameter.grad = twins[-1]

    key = fake_mode.from_tensor(torch.zeros((), dtype=torch.int64, device=request.device))
    lengths = [fake_mode.from_tensor(torch.zeros((), dtype=torch.int64, device=request.device)) for _ in request.rows]
    buffers = [_buffer(fake_mode, request, i) for i in range(len(request.arguments.tensors))]
    hypers = [shape_env.hyperparameter(f"hyper{i}", site.get()) for i, site in enumerate(request.hypers)]
    parameters = {i: t for i, t in enumerate(request.found.tensors) if id(t) in request.found.grads_after}
    entry_grads = {i: lift.twins[id(t)].grad for i, t in parameters.items()}
    lift.entering = {id(lift.twins[id(t)]): entry_grads[i] for i, t in parameters.items()}
    result: dict[str, Any] = {}

    def step(
        key: FakeTensor,
        lengths: list[FakeTensor],
        buffers: list[FakeTensor],
        hypers: list[torch.SymFloat],
        twins: list[FakeTensor],
    ) -> Any:
        del twins  # tracked by make_fx, reached through the lift mode
        _record_user_lines()
        with _installed(request, hypers, created, state_twins):
            with KeyedDraws(key), lifted_autograd_functions(lift), lift, request.modes():
                args, kwargs = request.arguments.rebuild(_rows(request, lengths, buffers))
                out = request.run(*args, **kwargs)
            leaves, result["spec"] = tree_flatten(out)
            result["constants"] = {}
            outputs = []
            for i, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor):
                    leaf = lift.swap(leaf).detach()
                elif not isinstance(leaf, SYMBOLIC):
                    result["constants"][i] = leaf
                    leaf = None
                outputs.append(leaf)
            grads = [lift.twins[id(t)].grad for t in parameters.values()]
            result["gradients"] = [
                (i, "none" if g is None else "same" if g is entry_grads[i] else "new")
                for i, g in zip(parameters, grads, strict=True)
            ]
            result["unlifted"] = list(lift.order)
            return outputs, [None if g is None else g.detach() for g in grads]

    with fake_mode, enable_python_dispatcher():
        fx_graph = make_fx(step, tracing_mode="real", record_stack_traces=True)(key, lengths, buffers, hypers, twins)
    if result["unlifted"]:
        raise CaptureRefused(
            "the step makes a tensor anew in each run, of data that is no tensor (torch.from_numpy, np.asarray)",
            where=lift.first_met,
            advice="make the tensor once, outside the step, and close over it",
        )
    return Traced(
        fx_graph,
        shape_env,
        fake_mode,
        [key, *lengths, *buffers, *hypers, *twins],
        lifted,
        list(request.hypers),
        result["spec"],
        result["spec"].num_leaves,
        result["constants"],
        result["gradients"],
        frozenset(i for i, grad in entry_grads.items() if grad is not None),
        frozenset(i for i, t in parameters.items() if id(lift.twins[id(t)]) in lift.looked_at),
    )


def _held_state(
    optimizers: Sequence[torch.optim.Optimizer],
) -> dict[int, tuple[torch.optim.Optimizer, torch.Tensor, str]]:
    """id of each tensor of optimizer state -> where it is held."""
    return {
        id(value): (optimizer, parameter, key)
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        if isinstance(parameter, torch.Tensor)
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def _constant(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: tensor


def _state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, key: str) -> Callable[[], torch.Tensor]:
    """What is there now: `load_state_dict` puts other tensors there."""
    return lambda: optimizer.state.get(parameter, {})[key]  # plain indexing makes an entry for what is only looked up


def _grad(parameter: torch.Tensor) -> Callable[[], torch.Tensor]:
    def resolve() -> torch.Tensor:
        assert parameter.grad is not None
        return parameter.grad

    return resolve


def _fake_like(fake_mode: FakeTensorMode, like: torch.Tensor, device: torch.device | None = None) -> FakeTensor:
    with fake_mode:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device or like.device)  # type: ignore[return-value]


def _buffer(fake_mode: FakeTensorMode, request: TraceRequest, index: int) -> FakeTensor:
    """A fake argument buffer. Its number of rows differs between the two traces, so that a size baked in shows up."""
    tensor = request.arguments.tensors[index]
    group = request.groups[index]
    shape = () if group is None else (request.rows[group], *(tensor.trailing or ()))
    with fake_mode:
        return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)  # type: ignore[return-value]


def _rows(request: TraceRequest, lengths: list[FakeTensor], buffers: list[FakeTensor]) -> dict[int, Any]:
    first: dict[int, torch.Tensor] = {}
    rows: dict[int, Any] = {}
    for tensor, group, buffer in zip(request.arguments.tensors, request.groups, buffers, strict=True):
        if group is None:
            value: torch.Tensor = buffer
        elif group in first:
            value = torch.ops.zgcompile.dynamic_rows_like(buffer, first[group])
        else:
            value = first[group] = torch.ops.zgcompile.dynamic_rows(buffer, lengths[group])
        rows[tensor.position] = value
    return rows


@contextlib.contextmanager
def _installed(
    request: TraceRequest, hypers: list[torch.SymFloat], created: dict[Any, CreatedState], twins: dict[Any, FakeTensor]
) -> Iterator[None]:
    """Symbolic hyperparameters and the created optimizer state in place of the user's; the Python snapshot takes them
    out again.

    `foreach` and `fused` are ways to launch the same update, so the plain form is traced: its scalars may be symbolic.
    """
    kept = [(site, site.get()) for site in request.hypers]
    for site, value in zip(request.hypers, hypers, strict=True):
        set_hyperparameter(site, value)
    for place, state in created.items():
        state.optimizer.state[state.parameter][state.key] = twins[place]
    forms: list[tuple[dict[str, Any], str, Any]] = []
    for optimizer in request.found.optimizers:
        for group in optimizer.param_groups:
            for form in ("foreach", "fused"):
                if form in group:
                    forms.append((group, form, group[form]))
                    group[form] = False
    try:
        yield
    finally:
        for group, form, value in forms:
            group[form] = value
        for site, number in kept:
            set_hyperparameter(site, number)


def set_hyperparameter(site: HyperSite, value: Any) -> None:
    if site.index is None:
        site.group[site.key] = value
    else:
        values = list(site.group[site.key])
        values[site.index] = value
        site.group[site.key] = type(site.group[site.key])(values)


def _record_user_lines() -> None:
    """Keep the user's frames, and only these, in each node's stack trace."""
    mode = get_proxy_mode()
    assert mode is not None

    def filtered(summary: traceback.StackSummary) -> traceback.StackSummary:
        return traceback.StackSummary.from_list([f for f in summary if is_user_file(f.filename)])

    mode.tracer._filter_traceback_frames = filtered  # type: ignore[method-assign, assignment]


def compare_traces(first: GraphModule, second: GraphModule) -> None:
    """Refuse a step whose two traces differ in structure or in a constant: replays would freeze what differed.

    Raises:
        CaptureRefused: naming the op, the user's line and the two values.
    """
    advice = "pass what changes from call to call as a tensor argument, or keep it out of the step"
    a, b = list(first.graph.nodes), list(second.graph.nodes)
    for x, y in zip(a, b, strict=False):
        where = user_line_from_stack_trace(x.meta.get("stack_trace") or "")
        if x.op != y.op or str(x.target) != str(y.target):
            raise CaptureRefused(
                f"two traces of the step differ: {x.target} and {y.target}", where=where, advice=advice
            )
        if repr((x.args, x.kwargs)) != repr((y.args, y.kwargs)):
            raise CaptureRefused(
                f"a constant of {x.target} changes from trace to trace: {_differing(x, y)}", where=where, advice=advice
            )
        if x.op == "get_attr":
            u, v = getattr(first, str(x.target)), getattr(second, str(y.target))
            if isinstance(u, torch.Tensor) and not _equal_constants(u, v):
                raise CaptureRefused(
                    f"a tensor built from Python numbers changes from trace to trace: {u} and {v}",
                    where=where,
                    advice=advice,
                )
    if len(a) != len(b):
        raise CaptureRefused(f"two traces of the step differ in length: {len(a)} and {len(b)} ops", advice=advice)


def compare_returned(first: Mapping[int, Any], second: Mapping[int, Any], where: SourceLine | None) -> None:
    """Refuse plain Python values among what the step returns that differ between two traces, such as a clock's.

    Raises:
        CaptureRefused: with the two values.
    """
    plain = (bool, int, float, complex, str, bytes)
    for i, value in first.items():
        other = second.get(i)
        if isinstance(value, plain) and isinstance(other, plain) and repr(value) != repr(other):
            raise CaptureRefused(
                f"the step returns a Python value that changes from trace to trace, {value!r} and {other!r}, and "
                "replays would return the first for ever",
                where=where,
                advice="take it outside the step: a time, around the call",
            )


def _equal_constants(u: torch.Tensor, v: torch.Tensor) -> bool:
    return u.shape == v.shape and u.dtype == v.dtype and (isinstance(u, FakeTensor) or torch.equal(u, v))


def _differing(x: torch.fx.Node, y: torch.fx.Node) -> str:
    u, v = tree_flatten((x.args, x.kwargs))[0], tree_flatten((y.args, y.kwargs))[0]
    pairs = [f"{p} and {q}" for p, q in zip(u, v, strict=False) if repr(p) != repr(q)]
    return ", ".join(pairs[:3]) or "their number"
