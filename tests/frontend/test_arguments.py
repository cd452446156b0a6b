"""Arguments of a compiled step: bad ones change nothing, lengths may differ from call to call."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zgcompile
from zgcompile.errors import BadInput, CaptureRefused, StepError, ZgError

GOOD = torch.tensor([3, 17, 5, 22, 9, 30, 11, 4])
BAD = {
    "another device": GOOD.to("meta"),
    "another dtype": GOOD.to(torch.int32),
    "a float": GOOD.float(),
    "another rank": GOOD[:, None],
    "a 0-d tensor": GOOD[0],
    "an empty batch": GOOD[:0],
    "an index too large": torch.tensor([3, 17, 40, 22, 9, 30, 11, 4]),
    "an index below -N": torch.tensor([3, 17, -41, 22, 9, 30, 11, 4]),
}


def build(w: Any) -> Any:
    w.opt = torch.optim.Adam(w.model.parameters(), lr=0.1)

    def step(seeds):
        w.visits[seeds] += 1
        loss = F.cross_entropy(F.dropout(w.model(w.x[seeds]), 0.3), w.y[seeds])
        w.train(loss)
        return loss

    return step


def test_a_decision_by_the_length_of_an_argument_names_it():
    def step(x, edge_index):
        if edge_index.shape[0] != 2:
            raise ValueError
        return x[edge_index[0]].sum()

    with pytest.raises(CaptureRefused, match=r"by the length of argument 'edge_index', \[2, 5\]") as caught:
        zgcompile.compile(step)(torch.randn(8, 3), torch.randint(8, (2, 5)))
    assert caught.value.where.text == "if edge_index.shape[0] != 2:"
    assert "x.t()" in caught.value.advice


def test_a_layer_of_pyg_is_no_file_of_the_user():
    nn = pytest.importorskip("torch_geometric.nn")
    layer = nn.SAGEConv(3, 3)
    with pytest.raises(CaptureRefused) as caught:
        zgcompile.compile(lambda x, edge_index: layer(x, edge_index))(torch.randn(8, 3), torch.randint(8, (2, 5)))
    assert caught.value.where.file.endswith("test_arguments.py")


@pytest.fixture(scope="module")
def trained(new_world):
    """One capture for all bad arguments: (compiled, its world)."""
    w = new_world()
    compiled = zgcompile.compile(build(w), warmup=1)
    for _ in range(3):
        compiled(GOOD)
    return compiled, w


@pytest.mark.parametrize("name", BAD)
def test_a_bad_argument_changes_nothing(name, trained, take_image):
    compiled, w = trained
    calls = compiled.stats.calls
    before = take_image(compiled.fn, w)
    with pytest.raises(ZgError) as caught:
        compiled(BAD[name])
    assert take_image(compiled.fn, w) == before
    assert isinstance(caught.value, StepError if "index" in name else BadInput)
    assert caught.value.where is not None
    if "index" in name:
        assert "visits[seeds]" in caught.value.where.text
    else:
        assert "'seeds'" in str(caught.value)
        assert caught.value.advice
    assert compiled.stats.calls == calls
    replays = compiled.stats.replays
    compiled(GOOD)
    assert compiled.stats.replays == replays + 1


def test_good_calls_between_bad_ones_train_like_eager(new_world, compare, batches_of):
    def made() -> Any:
        w = new_world()
        return build(w), w

    bad = [BAD["an index too large"], BAD["an index below -N"]]
    batches = batches_of(8, 8, 8, 8, 5)
    negative = batches[3] - 40
    compiled = compare(made, [batches[0], batches[1], bad[0], batches[2], bad[1], bad[0], negative, batches[4]])
    assert compiled.stats.replays >= 4


@pytest.mark.parametrize("name", ["a float", "another rank", "an empty batch", "an index too large"])
def test_a_bad_argument_at_the_first_call(name, new_world, take_image):
    """Whatever is wrong for this batch alone: refused, nothing changed, and the next call is right."""
    w, v = new_world(), new_world()
    step, oracle = build(w), build(v)
    compiled = zgcompile.compile(step, warmup=1)
    torch.manual_seed(3)
    rng = torch.get_rng_state()
    before = take_image(step, w)
    kind = (
        StepError
        if "index" in name
        else BadInput
        if "empty" in name
        else (ZgError, IndexError, RuntimeError, ValueError)
    )
    with pytest.raises(kind):
        compiled(BAD[name])
    assert take_image(step, w) == before
    from zgcompile.testing import injected_draws

    for _ in range(3):
        got = compiled(GOOD)
    torch.set_rng_state(rng)
    for _ in range(3):
        with injected_draws():
            want = oracle(GOOD)
    assert torch.allclose(got, want, atol=1e-6)
    assert torch.allclose(w.model.weight, v.model.weight, atol=1e-5)


def test_missing_and_extra_arguments(trained, take_image):
    compiled, w = trained
    before = take_image(compiled.fn, w)
    for args in ((), (GOOD, GOOD)):
        with pytest.raises((TypeError, ZgError)):
            compiled(*args)
    assert take_image(compiled.fn, w) == before


def test_batches_of_every_length(new_world, compare, batches_of):
    """A partial last batch, one seed, duplicates, isolated nodes, hops without an edge."""

    def made() -> Any:
        w = new_world()

        def step(seeds):
            row, neighbour = w.neighbours(seeds)
            nodes, inverse = torch.cat([seeds, neighbour]).unique(return_inverse=True)
            h = w.model(w.x[nodes])
            out = (
                torch.zeros(seeds.numel(), 3).index_add(0, row, h[inverse[seeds.numel() :]])
                + h[inverse[: seeds.numel()]]
            )
            loss = F.cross_entropy(out, w.y[seeds])
            w.train(loss)
            return loss, out, nodes, row

        return step, w

    special = [
        torch.tensor([0, 1, 39]),
        torch.tensor([0]),
        torch.tensor([5, 5, 5, 7, 7]),
        torch.arange(40),
        torch.tensor([39, 39]),
    ]
    compiled = compare(made, [*batches_of(24, 24, 17, 1, 2), *special, *batches_of(24, 3)], warmup=2, tolerance=1e-4)
    assert compiled.stats.replays >= 5


def test_arguments_that_are_equal_in_length_at_capture_and_not_later(new_world, compare, batches_of):
    def made() -> Any:
        w = new_world()

        def step(seeds, others, weights):
            loss = w.loss(seeds) + (w.model(w.x[others]) * weights[:, None]).sum()
            w.train(loss)
            return loss, seeds.size(0), others.size(0), torch.cat([seeds, others])

        return step, w

    def triple(n: int, m: int) -> Any:
        a, b = batches_of(n, m)
        return a, b, torch.linspace(0, 1, m)

    compare(made, [triple(8, 8), triple(8, 8), triple(8, 8), triple(8, 5), triple(3, 8), triple(8, 8), triple(1, 4)])


def test_equal_counts_at_capture_are_not_taken_for_one(new_world, compare):
    """As many seeds as neighbours as unique nodes at the first calls, and not later."""

    def made() -> Any:
        w = new_world()
        w.group = torch.arange(40)

        def step(seeds):
            ids = w.group[seeds].unique()
            picked = seeds[w.y[seeds] < w.limit[0]]
            loss = F.cross_entropy(w.model(w.x[ids]), w.y[ids]) + w.model(w.x[picked]).pow(2).mean() * 0.1
            w.train(loss)
            return loss, ids, picked, ids.numel(), picked.numel()

        w.limit = torch.tensor([3])
        return step, w

    def between(i: int, w: Any) -> None:
        if i == 3:
            w.limit.fill_(1)
        if i == 5:
            w.group.copy_(torch.arange(40) // 4)

    compare(made, [GOOD, GOOD.flip(0), GOOD, GOOD, GOOD, GOOD, GOOD[:6]], between)


def test_scalars_and_structures_as_arguments(new_world, compare, batches_of):
    def made() -> Any:
        w = new_world()

        def step(batch, *, scale, flag=False):
            seeds, label = batch["seeds"], batch["label"]
            loss = F.cross_entropy(w.model(w.x[seeds]), label) * scale["loss"]
            w.train(loss if flag else loss * 2)
            return loss

        def call(seeds, scale):
            return step({"seeds": seeds, "label": w.y[seeds]}, scale={"loss": scale})

        del call
        return (
            lambda seeds, scale, flag: step({"seeds": seeds, "label": w.y[seeds]}, scale={"loss": scale}, flag=flag)
        ), w

    batches = batches_of(*[8] * 6)
    compare(made, [(b, (1.0, 1.0, 2.0, 1.0, 2.0, 1.0)[i], i == 3) for i, b in enumerate(batches)])


def test_two_dimensional_and_scalar_tensor_arguments(new_world, compare, batches_of):
    def made() -> Any:
        w = new_world()

        def step(edges, temperature):
            loss = F.cross_entropy(w.model(w.x[edges[:, 0]] + w.x[edges[:, 1]]) / temperature, w.y[edges[:, 0]])
            w.train(loss)
            return loss

        return step, w

    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randint(0, 40, (n, 2), generator=generator), torch.tensor(1.0 + n)) for n in (8, 8, 3, 8, 1)]
    compare(made, batches)


def test_an_argument_of_rows_that_are_not_contiguous(new_world, compare):
    def made() -> Any:
        w = new_world()

        def step(seeds):
            loss = w.loss(seeds)
            w.train(loss)
            return loss

        return step, w

    wide = torch.arange(32).view(16, 2)
    compare(made, [wide[:8, 0], wide[:8, 1], wide[::2, 0], wide.t()[0][:6]])


def test_an_early_return_for_an_empty_selection(new_world, compare):
    """`if m.numel() == 0: return None` with none, one, two, many rows: the user's own answer each time, through one
    capture."""

    def made() -> Any:
        w = new_world()

        def step(seeds):
            chosen = seeds[seeds >= 20]
            if chosen.numel() == 0:
                return None
            loss = w.loss(chosen)
            w.train(loss)
            return loss

        return step, w

    batch = [
        torch.tensor(v)
        for v in (
            [1, 21, 22, 23],
            [30, 2, 31, 3],
            [1, 2, 3, 4],
            [1, 2, 3, 25],
            [1, 25, 3, 26],
            [21, 22, 23, 24],
            [1, 2, 3, 4],
        )
    ]
    compiled = compare(made, batch)
    assert compiled.stats.traces == 1
    assert compiled.stats.preconditions >= 2


def test_batch_norm_with_one_row_raises_as_eager(new_world, compare):
    def made() -> Any:
        w = new_world()
        w.model = nn.Sequential(w.model, nn.BatchNorm1d(3))
        w.opt = torch.optim.SGD(w.model.parameters(), lr=0.1, momentum=0.5)

        def step(seeds):
            chosen = seeds[seeds >= 20]
            loss = F.cross_entropy(w.model(w.x[chosen]), w.y[chosen])
            w.train(loss)
            return loss

        return step, w

    batch = [
        torch.tensor(v)
        for v in ([1, 21, 22, 23], [30, 2, 31, 3], [1, 2, 3, 21], [21, 22, 23, 24], [4, 3, 2, 26], [21, 5, 23, 24])
    ]
    compiled = compare(made, batch)
    assert compiled.stats.traces == 1


def test_a_named_tuple_of_one_tensor():
    batch = collections.namedtuple("Batch", "seeds")
    step = zgcompile.compile(lambda b: torch.unique(b.seeds), warmup=1)
    for i in range(4):
        assert torch.equal(step(batch(GOOD.roll(i))), torch.unique(GOOD.roll(i)))
    assert step.stats.replays == 3


def test_shapes_that_do_not_match_are_named_by_the_line():
    weight = torch.randn(8, 3)

    def step(seeds):
        return torch.randn(40, 16)[seeds] @ weight  # HERE

    with pytest.raises(CaptureRefused, match="RuntimeError: ") as caught:
        zgcompile.compile(step)(GOOD)
    assert "# HERE" in caught.value.where.text


def test_an_error_of_the_users_own_is_his():
    def step(seeds):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match=r"^mine$") as caught:
        zgcompile.compile(step)(GOOD)
    assert type(caught.value) is RuntimeError


def test_a_compiled_step_is_compiled_once():
    step = zgcompile.compile(build)
    assert zgcompile.compile(step) is step
