"""The replayed step on a GPU: one CUDA Graph, one launch a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zgcompile.backend.inductor import compile_with_inductor
from zgcompile.backend.replay import Launch, Replay, Replayed, planned_kernels
from zgcompile.backend.tight_pool import capture, capture_stream, pool_segments
from zgcompile.errors import InternalError
from zgcompile.ir.lowered import LoweredStep, NumberOutput, TensorOutput
from zgcompile.kernels import native

WARM_UP_RUNS = 2
LONGEST_STEP = 600.0  # seconds
WORDS_PER_SCALAR = 2  # 16 bytes: Inductor copies inputs that are less aligned, at every launch


class CudaGraphReplay(Replay):
    """A lowered step captured as a CUDA Graph.

    The launch block (launch id, key, lengths, hyperparameters) goes up by a copy node from pinned memory,
    `zgcompile::publish` hands the metadata to the host, and one kernel packs the returned tensors; so a call is: copy
    the arguments, launch, wait for the record, clone the pack.

    Warm-up and capture leave no trace in the user's state: it is saved and put back. The warm-up runs on `launch`, a
    true batch, because Inductor times its kernels in it and would choose for empty loops otherwise.
    """

    def __init__(
        self,
        lowered: LoweredStep,
        lifted: Sequence[torch.Tensor],
        device: torch.device,
        launch: Launch,
        lowering: str = "inductor",
    ) -> None:
        super().__init__(lowered, lifted, device)
        self.scalars = 2 + lowered.lengths  # the launch block, the key, the lengths
        words = WORDS_PER_SCALAR * self.scalars + lowered.hypers
        self.host_block = torch.zeros(words, dtype=torch.int64, device="cpu", pin_memory=True)
        self._host_ints = self.host_block.numpy()
        self._host_floats = self._host_ints.view("float64")
        self.block = torch.zeros(words, dtype=torch.int64, device=device)
        self.record = torch.zeros(1 + lowered.layout.size, dtype=torch.int64, device="cpu", pin_memory=True)
        self._record_words = self.record.numpy()
        self.launches = 0
        self.graph: torch.cuda.CUDAGraph
        self.tensors: list[torch.Tensor]
        self.pack: torch.Tensor | None
        inputs = self._inputs()
        self.function: Callable[..., list[torch.Tensor]] = lowered.fx_graph
        if lowering == "inductor":
            self.function = compile_with_inductor(lowered.fx_graph, inputs)
        self._capture(inputs, launch)

    def rebind(self, lifted: Sequence[torch.Tensor], launch: Launch) -> None:
        """Capture again with the code as it is: it knows shapes and strides, not addresses."""
        torch.cuda.synchronize(self.device)
        self.bind(lifted)
        self._capture(self._inputs(), launch)

    def _inputs(self) -> list[torch.Tensor]:
        launch = self.block[:WORDS_PER_SCALAR]
        scalars = [launch, *[self.block[WORDS_PER_SCALAR * i] for i in range(1, self.scalars)]]
        hypers = self.block[WORDS_PER_SCALAR * self.scalars :].view(torch.float64)
        return [*scalars, *self.buffers, hypers, *self.lifted, *self.gradients]

    def _write_block(self, launch: Launch, record: int) -> None:
        """The launch block on the host; `record` is where to publish, or 0."""
        self._host_ints[0], self._host_ints[1] = self.launches, record
        for i, value in enumerate((launch.key, *launch.lengths), 1):
            self._host_ints[WORDS_PER_SCALAR * i] = value
        for i, hyper in enumerate(launch.hypers, WORDS_PER_SCALAR * self.scalars):
            self._host_floats[i] = hyper

    def _capture(self, inputs: list[torch.Tensor], launch: Launch) -> None:
        self.graph, self.tensors, self.pack = torch.cuda.CUDAGraph(), [], None  # a former pool goes first
        if self.fits(launch):
            self.fill(launch)
            self._write_block(launch, record=0)
            self.block.copy_(self.host_block)
        written = [*(self.lifted[i] for i in self.lowered.written_lifted()), *self.gradients]
        saved = [t.clone() for t in written]
        stream = capture_stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.no_grad(), torch.cuda.stream(stream):
                for _ in range(WARM_UP_RUNS):
                    self.function(*inputs)
            torch.cuda.synchronize(self.device)
            with torch.no_grad():
                self.graph, (self.tensors, self.pack) = capture(lambda: self._body(inputs), self.device)
            self._pool_bytes = sum(segment["total_size"] for segment in pool_segments(self.graph))
        finally:
            torch.cuda.synchronize(self.device)
            with torch.no_grad():
                for tensor, value in zip(written, saved, strict=True):
                    tensor.copy_(value)
            torch.cuda.synchronize(self.device)

    def _body(self, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """What one launch does: the returned tensors and their pack."""
        self.block.copy_(self.host_block, non_blocking=True)
        metadata, _, *tensors = self.function(*inputs)
        if native() is None:
            self.record[1:].copy_(metadata, non_blocking=True)
        return tensors, self._packed(tensors)

    def _packed(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The bytes of the returned tensors, widest dtype first so that each piece stays aligned, in one buffer."""
        wanted = {o.position for o in self.lowered.outputs if isinstance(o, (TensorOutput, NumberOutput))}
        self._pieces: list[tuple[int, torch.dtype, tuple[int, ...], int, int]] = []
        order = sorted(wanted, key=lambda i: -tensors[i].element_size())
        flat, offset = [], 0
        for i in order:
            tensor = tensors[i]
            size = tensor.numel() * tensor.element_size()
            self._pieces.append((i, tensor.dtype, tuple(tensor.shape), offset, size))
            if size:
                flat.append(tensor.contiguous().reshape(-1).view(torch.uint8))
            offset += size
        return torch.cat(flat) if flat else None

    def run(self, launch: Launch) -> Replayed:
        self.launches += 1
        stream = _in_order(self.device)
        self._write_block(launch, self.record.data_ptr())
        self.fill(launch)
        self.graph.replay()
        self._await(stream)
        metadata = self._record_words[1:].tolist()
        tensors: list[torch.Tensor] = [self.record] * len(self.tensors)
        if self.pack is not None:
            pack = self.pack.clone()
            for i, dtype, shape, offset, size in self._pieces:
                tensors[i] = pack[offset : offset + size].view(dtype).view(shape)
        return Replayed(metadata, tensors)

    def _await(self, stream: torch.cuda.Stream) -> None:
        """Return when the step is known good or bad: its status is published behind the last op that can fail, and the
        rest of the step runs on meanwhile. The launch block may be rewritten then, as its copy lies in front of that
        op."""
        module = native()
        if module is None:
            stream.synchronize()
            return
        try:
            module.await_record(self.record.data_ptr(), self.launches, stream.cuda_stream, LONGEST_STEP)
        except module.LaunchError as error:
            raise InternalError(f"the replayed step: {error}") from error

    def pool_bytes(self) -> int:
        """Bytes of the CUDA Graph's own memory, noted at the capture: to ask the allocator is slow."""
        return self._pool_bytes

    def memory(self) -> int:
        return super().memory() + self.pool_bytes()

    def kernel_plan(self) -> dict[str, int]:
        return planned_kernels(self.lowered)


_last_stream: dict[torch.device, torch.cuda.Stream] = {}


def _in_order(device: torch.device) -> torch.cuda.Stream:
    """The current stream, behind every replay launched on another one: a step's static buffers serve one launch at a
    time, and all captured steps of a device share cuBLAS's workspace."""
    stream = torch.cuda.current_stream(device)
    last = _last_stream.get(device)
    if last != stream:
        if last is not None:
            stream.wait_stream(last)
        _last_stream[device] = stream
    return stream
