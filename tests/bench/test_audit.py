from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from zgcompile.bench.audit import audit, owner_of, parse, union_us
from zgcompile.errors import ZgError

EVENTS = json.loads((Path(__file__).parent / "trace.json").read_text())["traceEvents"]
OWN = {"zgcompile::sample": "sample", "zgcompile::sample_neighbours": "sample_neighbours_kernel"}


@pytest.fixture
def trace():
    return parse(EVENTS, steps=2, own=OWN)


def test_counts_launches_copies_and_host_waits_within_the_window_only(trace):
    assert trace.graph_launches == 2
    assert trace.per_step(trace.graph_launches) == 1
    assert trace.direct_launches == 1
    assert trace.copies == {"HtoD": 1, "DtoH": 1, "memset": 1, "pageable": 1}
    assert trace.host_syncs == {"cudaStreamSynchronize": 1}
    assert trace.allocations == 1


def test_busy_time_is_the_union_of_kernel_intervals(trace):
    # [1020, 1050], [1060, 1090], [1120, 1150], [1160, 1250]; wall from 1000 to the copy's end
    assert trace.busy_us == 30 + 30 + 30 + 90
    assert trace.wall_us == 251
    assert trace.busy_share == pytest.approx(180 / 251)


def test_kernels_by_owner_and_by_time(trace):
    assert trace.owners == {"zgcompile::sample_neighbours": 2, "zgcompile::sample": 1, "inductor": 2, "aten": 2}
    assert (trace.kernels[0].name, trace.kernels[0].launches, trace.kernels[0].us) == ("sm90_xmma_gemm_f32f32", 2, 110)


def test_kernels_that_were_never_captured_are_unplanned(trace):
    assert trace.unplanned({"zgcompile::sample_neighbours": 1}) == {}
    assert trace.unplanned({"zgcompile::relabel": 3, "zgcompile::sample_neighbours": 2}) == {
        "zgcompile::relabel": (0, 3),
        "zgcompile::sample_neighbours": (1, 2),
    }


def test_without_a_window_everything_counts():
    events = [e for e in EVENTS if e["name"] != "zgcompile.audit"]
    trace = parse(events, steps=1)
    assert trace.direct_launches == 3
    assert trace.host_syncs == {"cudaStreamSynchronize": 1, "cudaDeviceSynchronize": 1}
    assert {k.name for k in trace.kernels} >= {"warmup_kernel", "after_kernel"}


def test_an_empty_trace_and_no_steps():
    assert parse([], steps=1).busy_share == 0
    with pytest.raises(ZgError, match="at least one step"):
        parse(EVENTS, steps=0)


def test_longest_substring_owns_a_kernel():
    assert owner_of("sample_neighbours_kernel", OWN) == "zgcompile::sample_neighbours"
    assert owner_of("triton_per_fused_sample_2", OWN) == "zgcompile::sample"
    assert owner_of("triton_per_fused_sum_2", OWN) == "inductor"
    assert owner_of("cutlass::Kernel", OWN) == "aten"


def test_union_of_nested_touching_and_apart():
    assert union_us([(0, 10), (2, 3), (10, 12), (20, 21)]) == 13
    assert union_us([]) == 0


def test_table_shows_every_owner_and_wait(trace):
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(trace.table())
    text = console.export_text()
    for part in (
        "zgcompile::sample_neighbours",
        "cudaStreamSynchronize",
        "copy DtoH",
        "CUDA Graph launches",
        "busy 72%",
    ):
        assert part in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_collection_refuses_without_cuda():
    with pytest.raises(ZgError, match="CUDA device"):
        audit(lambda i: None)


@pytest.mark.gpu
def test_collection_on_a_gpu_sees_one_graph_launch_a_step_and_no_wait():
    x = torch.ones(1 << 16, device="cuda")
    x.mul_(1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.mul_(1.5)
        x.add_(1.0)
    replayed = audit(lambda i: graph.replay(), steps=5)
    assert (replayed.graph_launches, replayed.direct_launches, replayed.host_syncs) == (5, 0, {})
    assert replayed.owners == {"aten": 10}
    eager = audit(lambda i: x.sum().item(), steps=5)
    assert eager.graph_launches == 0
    assert eager.direct_launches >= 5
    assert sum(eager.host_syncs.values()) >= 5
    assert eager.copies["DtoH"] == 5
