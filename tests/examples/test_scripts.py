"""Each script runs as a user runs it: the loss falls, and the accuracy beats the largest class."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

RUNS = [
    "sage_torch",
    "sage_torch --layers 3 --fanout 5,3,-1 --optimizer adamw --dropout 0.2",
    "sage_torch --optimizer sgd --lr 0.5 --dropout 0 --fanout=-1,-1",
    "gcn_pyg_layers --conv sage",
    "gcn_pyg_layers --conv gcn",
    "gcn_pyg_layers --conv gat --fanout 5,3",
    "masked_loss --batch 300",
]


def run(command: str, capsys) -> tuple[list[float], float]:
    name, *argv = command.split()
    if name == "gcn_pyg_layers":
        pytest.importorskip("torch_geometric")
    importlib.import_module(name).main([*argv, "--hidden", "16", "--epochs", "6"])
    out = capsys.readouterr().out
    return [float(x) for x in re.findall(r"loss ([\d.]+)", out)], float(re.findall(r"test accuracy ([\d.]+)", out)[0])


@pytest.mark.parametrize("command", RUNS)
def test_learns(command, capsys):
    losses, accuracy = run(command, capsys)
    assert len(losses) == 6
    assert losses[-1] < 0.8 * losses[0]
    assert accuracy > 0.5  # four classes of about equal size


@pytest.mark.parametrize("command", ["sage_torch", "masked_loss"])
def test_is_fixed_by_its_seed(command, capsys):
    assert run(command, capsys) == run(command, capsys)
    assert run(command, capsys) != run(f"{command} --seed 1", capsys)


def test_runs_as_a_program():
    script = Path(__file__).parents[2] / "examples" / "sage_torch.py"
    # With PYTHONSAFEPATH set no script finds the modules beside it.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    command = [sys.executable, str(script), "--epochs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout


def test_fanouts_and_layers_must_agree(capsys):
    with pytest.raises(SystemExit):
        importlib.import_module("sage_torch").main(["--layers", "3"])
    assert "2 hops for --layers 3" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["sage_torch", "gcn_pyg_layers", "masked_loss"])
def test_build_gives_a_step_over_the_users_own_objects(name):
    if name == "gcn_pyg_layers":
        pytest.importorskip("torch_geometric")
    module = importlib.import_module(name)
    train_step, model, opt, data = module.build(module.arguments(["--hidden", "8"]))
    assert train_step.__name__ == "train_step"
    before = [p.clone() for p in model.parameters()]
    train_step(data.train[:7])
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert len(opt.state) == len(before)


@pytest.mark.parametrize("fanout", [-1, 3])
def test_sampler_draws_the_neighbours_it_may(fanout):
    sage = importlib.import_module("sage_torch")
    data = importlib.import_module("input_graph").load()
    torch.manual_seed(0)
    dst = torch.arange(200)
    row, neighbour = sage.sample_neighbours(data.indptr, data.indices, dst, fanout)
    for v in dst.tolist():
        all_ = data.indices[data.indptr[v] : data.indptr[v + 1]].tolist()
        drawn = neighbour[row == v].tolist()
        if fanout < 0 or len(all_) <= fanout:
            assert drawn == all_
        else:
            assert len(drawn) == fanout
            assert set(drawn) <= set(all_)


def test_full_neighbourhood_mean_matches_the_dense_one():
    sage = importlib.import_module("sage_torch")
    data = importlib.import_module("input_graph").load()
    torch.manual_seed(0)
    conv = sage.SAGEConv(data.feat.size(1), 5)
    seeds = torch.randperm(data.num_nodes)[:50]
    nodes, (block,) = sage.sample_blocks(data.indptr, data.indices, seeds, [-1])
    adjacency = torch.zeros(data.num_nodes, data.num_nodes)
    adjacency[torch.repeat_interleave(torch.arange(data.num_nodes), data.indptr.diff()), data.indices] = 1
    mean = adjacency @ data.feat / adjacency.sum(1, keepdim=True).clamp(min=1)
    expected = conv.neighbour(mean[seeds]) + conv.root(data.feat[seeds])
    torch.testing.assert_close(conv(data.feat[nodes], *block), expected)


def test_masked_subgraph_keeps_only_edges_and_roughly_the_asked_share():
    masked = importlib.import_module("masked_loss")
    data = importlib.import_module("input_graph").load()
    torch.manual_seed(0)
    seeds = torch.randperm(data.num_nodes)[:400]
    nodes, src, dst = masked.sample_subgraph(data.indptr, data.indices, seeds, 1, 0.5)
    edges = {(v, u) for v in seeds.tolist() for u in data.indices[data.indptr[v] : data.indptr[v + 1]].tolist()}
    kept = list(zip(nodes[dst].tolist(), nodes[src].tolist(), strict=True))
    assert set(kept) <= edges
    assert len(set(kept)) == len(kept)
    assert len(kept) == pytest.approx(len(edges) / 2, rel=0.1)
    assert set(seeds.tolist()) <= set(nodes.tolist())
    assert torch.equal(nodes, nodes.unique())


def test_a_batch_without_labelled_nodes_has_loss_zero_not_nan():
    masked = importlib.import_module("masked_loss")
    args = masked.arguments(["--keep", "0", "--hidden", "8"])
    train_step, model, _, data = masked.build(args)
    loss, correct, count = train_step(data.test[:30])
    assert (loss.item(), correct.item(), count.item()) == (0.0, 0, 0)
    assert all(torch.isfinite(p).all() for p in model.parameters())
