"""zgcompile::publish: the record reaches the host whole, launch id last, also from a replayed CUDA Graph; the gate is
shut by any of the checks and by nothing else."""

import pytest
import torch

import zgcompile.kernels  # noqa: F401 (registers the op)
from zgcompile.errors import BadInput
from zgcompile.kernels._load import native

publish = torch.ops.zgcompile.publish


def test_the_result_is_the_launch_id_and_the_gate():
    metadata, launch = torch.tensor([0, 0, 0, 5, 6]), torch.tensor([7, 0])
    assert publish(metadata, launch, 3).tolist() == [7, 1]
    assert publish(metadata, launch, 4).tolist() == [7, 0]
    assert publish(metadata[:0], launch, 0).tolist() == [7, 1]
    torch.library.opcheck(publish, (metadata, launch, 3))


@pytest.mark.parametrize("launch", [torch.zeros(3, dtype=torch.int64), torch.zeros(2)])
def test_a_wrong_launch_block_is_refused(launch):
    with pytest.raises(BadInput, match="launch must be int64"):
        publish(torch.arange(5), launch, 2)


@pytest.mark.parametrize("checks", [-1, 6])
def test_more_checks_than_words_are_refused(checks):
    with pytest.raises(BadInput, match=r"checks must be in \[0, 5\]"):
        publish(torch.arange(5), torch.tensor([7, 0]), checks)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 127, 128, 129, 300])
@pytest.mark.parametrize("record", [False, True])
def test_any_check_shuts_the_gate_and_no_count_does(size, record):
    words = torch.zeros(1 + 2 * size, dtype=torch.int64, pin_memory=True)
    launch = torch.tensor([7, words.data_ptr() if record else 0], device="cuda")
    counts = torch.full((size,), 3, device="cuda")
    for failed in [None, 0, size // 2, size - 1]:
        checks = torch.zeros(size, dtype=torch.int64, device="cuda")
        if failed is not None:
            checks[failed] = 1 << 40  # a word, not a byte or a bit
        assert publish(torch.cat([checks, counts]), launch, size).tolist() == [7, int(failed is None)]


@pytest.mark.gpu
@pytest.mark.parametrize("size", [0, 1, 127, 128, 129, 1000])
def test_record_holds_metadata_and_id(size):
    record = torch.full((1 + size,), -1, dtype=torch.int64, pin_memory=True)
    metadata = torch.randint(-(2**60), 2**60, (size,), device="cuda")
    launch = torch.tensor([42, record.data_ptr()], device="cuda")
    published = publish(metadata, launch, 0)
    stream = torch.cuda.current_stream().cuda_stream
    native().await_record(record.data_ptr(), 42, stream, 10.0)
    assert record[1:].tolist() == metadata.tolist()
    assert published.tolist() == [42, 1]


@pytest.mark.gpu
def test_replay_publishes_new_data_each_time():
    record = torch.zeros(4, dtype=torch.int64, pin_memory=True)
    metadata = torch.zeros(3, dtype=torch.int64, device="cuda")
    launch = torch.tensor([0, record.data_ptr()], device="cuda")
    publish(metadata, launch, 3)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        publish(metadata, launch, 3)
    for step in range(1, 20):
        metadata.fill_(step * 10)
        launch[0] = step
        captured.replay()
        native().await_record(record.data_ptr(), step, torch.cuda.current_stream().cuda_stream, 10.0)
        assert record.tolist() == [step, step * 10, step * 10, step * 10]


@pytest.mark.gpu
def test_a_launch_that_never_publishes_is_an_error():
    record = torch.zeros(1, dtype=torch.int64, pin_memory=True)
    torch.cuda.synchronize()
    with pytest.raises(native().LaunchError, match="did not publish"):
        native().await_record(record.data_ptr(), 1, torch.cuda.current_stream().cuda_stream, 10.0)
