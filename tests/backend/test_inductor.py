"""Inductor's code for a lowered step, where it is ours to say how an op is written. On the CPU, in C++."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from zgcompile.backend.inductor import compile_with_inductor
from zgcompile.keyed_numbers import bernoulli_from_bits, keyed_bits_reference, uniform_from_bits

KEY = torch.tensor(-123456789123456789)


def dropout_and_its_gradient(key, x, gradient):
    """The mask is read in the forward and the backward pass."""
    bits = torch.ops.zgcompile.keyed_bits(key, 3, list(x.shape))
    mask = bernoulli_from_bits(bits, 0.5)
    h = x.relu()
    positive = torch.ops.zgcompile.unpack_bits(torch.ops.zgcompile.pack_bits(h > 0), list(x.shape))
    out = (h * mask * 2).sum(1)
    return [out, torch.where(positive & mask, gradient * 2, 0), torch.ops.zgcompile.keyed_bits(key, 4, [9])]


def two_products(x, a, b, c, d, bias):
    total = torch.ops.zgcompile.accumulate_mm(torch.addmm(bias, a, b), c, d)
    return [total.relu() * x, total.sum(1)]


def compiled(fn, *args):
    return compile_with_inductor(make_fx(fn, tracing_mode="fake")(*args), list(args))


@pytest.fixture(scope="module")
def inputs():
    return KEY, torch.randn(70, 33), torch.randn(70, 33)


def test_draws_and_kept_values_are_those_of_the_references(inputs, fresh_cache):
    expected = dropout_and_its_gradient(*inputs)
    got = compiled(dropout_and_its_gradient, *inputs)(*inputs)
    torch.testing.assert_close(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    assert torch.equal(got[2], expected[2])


def test_products_accumulate_in_place(fresh_cache):
    torch.manual_seed(0)
    args = [torch.randn(s) for s in ((70, 33), (70, 8), (8, 33), (70, 9), (9, 33), (33,))]
    expected = two_products(*args)
    function = compiled(two_products, *args)
    for _ in range(2):  # a second run finds nothing of the first
        torch.testing.assert_close(function(*args), expected, rtol=1e-5, atol=1e-5)


def status(x, ids, cap):
    """As a step's metadata: checks of all kinds, and counts. More pieces than Inductor stacks in one kernel."""
    checks = [(ids >= cap).any(), x.isnan().any(), (ids < 0).any(), cap > 5, cap == 7, (x > 3).any()]
    counts = [ids.sum(), cap * 2, cap, ids.max(), (ids == 3).sum(), cap + ids[0]]
    words = torch.ops.zgcompile.stack_scalars([v.to(torch.int64) for v in (*checks, *counts)])
    return [words, words * 2]


def status_inputs(device="cpu"):
    return torch.randn(50, device=device), torch.arange(40, device=device), torch.tensor(7, device=device)


def test_scalars_are_stacked_in_order(fresh_cache):
    args = status_inputs()
    for got, want in zip(compiled(status, *args)(*args), status(*args), strict=True):
        assert torch.equal(got, want)


def test_a_second_compilation_is_read_from_the_disk(inputs, fresh_cache):
    from torch._dynamo.utils import counters

    for found in ("fxgraph_cache_miss", "fxgraph_cache_hit"):
        counters["inductor"].clear()
        compiled(dropout_and_its_gradient, *inputs)
        assert counters["inductor"][found] == 1, dict(counters["inductor"])


def test_another_lowering_of_ours_is_another_entry(inputs, fresh_cache, monkeypatch):
    from torch._dynamo.utils import counters

    compiled(dropout_and_its_gradient, *inputs)
    monkeypatch.setattr("zgcompile.backend.inductor.CACHE_TAG", "other")
    counters["inductor"].clear()
    compiled(dropout_and_its_gradient, *inputs)
    assert counters["inductor"]["fxgraph_cache_miss"] == 1


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(), (100_003,), (4099, 67), (5, 1, 7, 3)])
def test_the_same_bits_on_a_gpu(size):
    def draw(key):
        bits = torch.ops.zgcompile.keyed_bits(key, 3, list(size))
        return [bits, bernoulli_from_bits(bits, 0.3), uniform_from_bits(bits, torch.float32) * 2]

    bits = keyed_bits_reference(KEY, 3, size)
    expected = [bits, bernoulli_from_bits(bits, 0.3), uniform_from_bits(bits, torch.float32) * 2]
    for got, want in zip(compiled(draw, KEY.cuda())(KEY.cuda()), expected, strict=True):
        assert torch.equal(got.cpu(), want)


@pytest.mark.gpu
def test_the_stack_of_a_status_is_one_kernel(fresh_cache):
    def plain(*scalars):
        return [torch.ops.zgcompile.stack_scalars([s + i for i, s in enumerate(scalars)])]

    args = [torch.tensor(10 * i, device="cuda") for i in range(40)]
    function = compiled(plain, *args)
    (got,) = function(*args)
    assert got.tolist() == [11 * i for i in range(40)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        function(*args)
        torch.cuda.synchronize()
    kernels = [e.name for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1, kernels
    on_gpu = status_inputs("cuda")
    for got, want in zip(compiled(status, *on_gpu)(*on_gpu), status(*on_gpu), strict=True):
        assert torch.equal(got, want)
