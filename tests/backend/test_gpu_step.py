"""The captured step on a GPU: one launch, no host wait but the status, the eager function's results, whatever the
batch."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

import zgcompile
from zgcompile.bench.audit import audit
from zgcompile.bench.sage import SAGE, make_step
from zgcompile.bench.synthetic import Shape, power_law
from zgcompile.errors import StepError
from zgcompile.testing import injected_draws

pytestmark = pytest.mark.gpu
SHAPE = Shape(3000, 60_000, 32, 7)
DIMS, FANOUTS = (32, 48, 7), (10, 5)


@pytest.fixture(scope="module")
def input_graph():
    return power_law(SHAPE, device="cuda")


def pair(input_graph, lr=1e-2, **options):
    """An eager step and a compiled one on equal copies: (eager, model), (compiled, model, optimizer)."""
    torch.manual_seed(0)
    model = SAGE(DIMS).cuda()
    twin = copy.deepcopy(model)
    eager = make_step(model, torch.optim.Adam(model.parameters(), lr=lr), input_graph, FANOUTS)
    optimizer = torch.optim.Adam(twin.parameters(), lr=lr)
    step = zgcompile.compile(make_step(twin, optimizer, input_graph, FANOUTS), **options)
    return (eager, model), (step, twin, optimizer)


def batches(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randperm(SHAPE.nodes, generator=generator)[:n].cuda() for n in lengths]


def run_both(eager, step, seeds, seed=11):
    torch.manual_seed(seed)
    expected = []
    for batch in seeds:
        with injected_draws(device="cuda"):
            expected.append(float(eager(batch).detach()))
    torch.manual_seed(seed)
    return expected, [step(batch) for batch in seeds]


def close(a, b, tolerance=1e-4):
    return (a - b).abs().max().item() <= tolerance * b.abs().max().clamp(min=1e-6).item()


@pytest.fixture(scope="module")
def trained(input_graph):
    """One step, trained beside eager on batches of many lengths: the capture that most tests look at."""
    (eager, model), (step, twin, optimizer) = pair(input_graph)
    seeds = batches([64, 64, 64, 64, 40, 17, 1, 2] + [64] * 60)
    expected, losses = run_both(eager, step, seeds)
    return {"model": model, "twin": twin, "step": step, "optimizer": optimizer, "expected": expected, "losses": losses}


def test_training_equals_eager_under_injected_draws(trained):
    losses = [float(loss) for loss in trained["losses"]]
    assert losses == pytest.approx(trained["expected"], rel=1e-4)
    for p, q in zip(trained["twin"].parameters(), trained["model"].parameters(), strict=True):
        assert close(p.detach(), q.detach(), 1e-3)


def test_nearly_every_call_is_a_replay_of_one_capture(trained):
    stats = trained["step"].stats
    assert stats.captures == 1 and stats.traces == 1 and stats.overflows == 0
    assert stats.replays >= 0.95 * (stats.calls - 3)
    assert stats.host_reads == stats.replays


def test_kept_losses_are_values_of_their_own(trained):
    assert len({t.data_ptr() for t in trained["losses"][-50:]}) == 50


def test_one_cuda_graph_launch_a_step_and_own_kernels_as_planned(trained):
    step, seeds = trained["step"], batches([64] * 4, seed=3)
    plan = step.kernel_plan()
    trace = audit(lambda i: step(seeds[i % 4]), steps=8, own={kernel: kernel for kernel in plan})
    assert trace.graph_launches == 8
    assert trace.direct_launches == 0
    assert trace.unplanned(plan) == {}
    assert not trace.host_syncs
    assert trace.allocations == 0
    assert {"inductor", "aten"} | set(plan) >= set(trace.owners)
    assert trace.copies.get("DtoH", 0) == 0 and trace.copies.get("pageable", 0) == 0


def test_steady_state_has_no_hidden_synchronisation(trained):
    seeds = batches([64, 50, 3, 64], seed=4)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in seeds * 5:
            trained["step"](batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trained["step"].stats.captures == 1


def test_new_inputs_give_new_outputs(trained):
    step, (a, b) = trained["step"], batches([64, 64], seed=5)
    optimizer = trained["optimizer"]
    kept = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    try:
        losses = []
        for batch in (a, a, b):
            torch.manual_seed(3)
            losses.append(step(batch).item())
    finally:
        for group, lr in zip(optimizer.param_groups, kept, strict=True):
            group["lr"] = lr
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert abs(losses[0] - losses[2]) > 1e-3
    assert step.stats.captures == 1  # the learning rate is a device value


def test_three_hundred_lengths_one_capture_flat_memory(trained):
    step = trained["step"]
    lengths = torch.randint(1, 65, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    seeds = batches(lengths, seed=6)
    for batch in seeds[:100]:
        step(batch)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for batch in seeds[100:]:
        step(batch)
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
    assert step.stats.captures == 1


def test_results_do_not_depend_on_what_the_pool_held(input_graph):
    (eager, _), (step, _, _) = pair(input_graph)
    seeds = batches([64] * 6, seed=7)
    expected, losses = run_both(eager, step, seeds)
    gc.collect()
    torch.cuda.empty_cache()
    poison = [torch.full((1 << 26,), float("nan"), device="cuda") for _ in range(8)]
    del poison
    more = batches([64, 5, 64], seed=8)
    expected2, losses2 = run_both(eager, step, more)
    assert [float(x) for x in losses + losses2] == pytest.approx(expected + expected2, rel=1e-4)


def test_an_overflow_runs_the_batch_once_exactly(input_graph):
    (eager, model), (step, twin, _) = pair(input_graph, envelope=zgcompile.Envelope(headroom=1.0))
    small, large = batches([16] * 4, seed=9), batches([16, 64, 16, 64, 64, 64, 64], seed=10)
    expected, losses = run_both(eager, step, small + large)
    assert [float(x) for x in losses] == pytest.approx(expected, rel=1e-4)
    assert step.stats.overflows >= 1
    assert step.stats.calls == len(small + large)
    for p, q in zip(twin.parameters(), model.parameters(), strict=True):
        assert close(p.detach(), q.detach(), 1e-3)


def test_an_index_out_of_range_raises_and_changes_nothing(trained):
    step, twin = trained["step"], trained["twin"]
    before = [p.detach().clone() for p in twin.parameters()]
    state = torch.cuda.get_rng_state()
    bad = batches([64], seed=12)[0]
    bad[5] = SHAPE.nodes + 7
    with pytest.raises(StepError, match=r"sage\.py"):
        step(bad)
    torch.cuda.synchronize()
    assert all(torch.equal(p, q) for p, q in zip(before, twin.parameters(), strict=True))
    assert torch.equal(state, torch.cuda.get_rng_state())
    step(batches([64], seed=12)[0])


def test_two_compiled_steps_interleave(input_graph):
    (eager_a, _), (step_a, _, _) = pair(input_graph)
    (eager_b, _), (step_b, _, _) = pair(input_graph, lr=1e-3)
    seeds = batches([64] * 8, seed=13)
    torch.manual_seed(0)
    expected = []
    for batch in seeds:
        for eager in (eager_a, eager_b):
            with injected_draws(device="cuda"):
                expected.append(float(eager(batch).detach()))
    torch.manual_seed(0)
    got = [float(step(batch)) for batch in seeds for step in (step_a, step_b)]
    assert got == pytest.approx(expected, rel=1e-4)


def test_plain_aten_lowering_agrees_with_inductor(input_graph):
    (_, _), (step, _, _) = pair(input_graph)
    (_, _), (plain, _, _) = pair(input_graph, lowering="aten")
    seeds = batches([64, 64, 64, 64, 20, 64], seed=14)
    results = []
    for compiled in (step, plain):
        torch.manual_seed(1)
        results.append([float(compiled(batch)) for batch in seeds])
    assert results[0] == pytest.approx(results[1], rel=1e-4)
