// Python's side of the launchers: integers become pointers, a CUDA error becomes LaunchError naming the op and its
// sizes.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "launchers.h"

namespace py = pybind11;
namespace zg = zgcompile;

namespace {

struct LaunchError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <typename T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

cudaStream_t stream_at(uintptr_t address) { return reinterpret_cast<cudaStream_t>(address); }

void check(cudaError_t error, const char* op, std::initializer_list<std::pair<const char*, int64_t>> sizes) {
  if (error == cudaSuccess) return;
  std::ostringstream message;
  message << op << "(";
  const char* separator = "";
  for (const auto& [name, size] : sizes) {
    message << separator << name << "=" << size;
    separator = ", ";
  }
  message << "): " << cudaGetErrorName(error) << ", " << cudaGetErrorString(error);
  throw LaunchError(message.str());
}

bool shows(uintptr_t record, int64_t launch) {
  return __atomic_load_n(reinterpret_cast<const int64_t*>(record), __ATOMIC_ACQUIRE) == launch;
}

// The record is a few microseconds away as a rule, so this spins; now and then it looks at the stream, for a fault
// would keep the record from ever being written, and at Python's signals.
void await_record(uintptr_t record, int64_t launch, uintptr_t stream, double timeout) {
  using Clock = std::chrono::steady_clock;
  constexpr int kSpins = 4096;
  constexpr auto kSignals = std::chrono::milliseconds(50);
  const auto start = Clock::now();
  auto signals = start + kSignals;
  py::gil_scoped_release release;
  while (true) {
    for (int i = 0; i < kSpins; ++i) {
      if (shows(record, launch)) return;
    }
    const cudaError_t state = cudaStreamQuery(stream_at(stream));
    if (state == cudaSuccess) {
      if (shows(record, launch)) return;
      throw LaunchError("the launch ended and did not publish its status");
    }
    if (state != cudaErrorNotReady) {
      throw LaunchError(std::string("the launch failed: ") + cudaGetErrorName(state) + ", " +
                        cudaGetErrorString(state));
    }
    cudaGetLastError();  // cudaErrorNotReady is an answer, not a fault
    const auto now = Clock::now();
    if (now > signals) {
      signals = now + kSignals;
      py::gil_scoped_acquire acquire;
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
    if (std::chrono::duration<double>(now - start).count() > timeout) {
      throw LaunchError("the launch did not publish its status in time");
    }
  }
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  py::register_exception<LaunchError>(m, "LaunchError", PyExc_RuntimeError);

  m.def("compact_workspace", &zg::compact_workspace, py::arg("length"));
  m.def("compact", [](uintptr_t flags, uintptr_t n, int64_t length, int64_t cap, uintptr_t positions, uintptr_t count,
                      uintptr_t workspace, uintptr_t stream) {
    check(zg::compact(at<uint8_t>(flags), at<int64_t>(n), length, cap, at<int64_t>(positions), at<int64_t>(count),
                      at<void>(workspace), stream_at(stream)),
          "compact", {{"length", length}, {"cap", cap}});
  });

  m.def("repeat_interleave_workspace", &zg::repeat_interleave_workspace, py::arg("length"));
  m.def("repeat_interleave", [](uintptr_t repeats, int id_bytes, uintptr_t n, int64_t length, int64_t cap,
                                uintptr_t index, uintptr_t total, uintptr_t workspace, uintptr_t stream) {
    check(zg::repeat_interleave(at<void>(repeats), id_bytes, at<int64_t>(n), length, cap, at<void>(index),
                                at<int64_t>(total), at<void>(workspace), stream_at(stream)),
          "repeat_interleave", {{"id_bytes", id_bytes}, {"length", length}, {"cap", cap}});
  });

  m.def("unique_workspace", &zg::unique_workspace, py::arg("bound"));
  m.def("unique", [](uintptr_t ids, int id_bytes, uintptr_t n, int64_t length, int64_t bound, int64_t cap,
                     bool need_counts, uintptr_t values, uintptr_t inverse, uintptr_t counts, uintptr_t count,
                     uintptr_t in_bound, uintptr_t workspace, uintptr_t stream) {
    check(zg::unique(at<void>(ids), id_bytes, at<int64_t>(n), length, bound, cap, at<void>(values),
                     at<int64_t>(inverse), need_counts ? at<int64_t>(counts) : nullptr, at<int64_t>(count),
                     at<bool>(in_bound), at<void>(workspace), stream_at(stream)),
          "unique", {{"id_bytes", id_bytes}, {"length", length}, {"bound", bound}, {"cap", cap}});
  });

  m.def("concat_limit", [] { return zg::kConcatLimit; });
  m.def("concat", [](const std::vector<uintptr_t>& pieces, const std::vector<int64_t>& lengths, uintptr_t counts,
                     int64_t cap, int64_t row_bytes, uintptr_t out, uintptr_t stream) {
    if (pieces.size() != lengths.size()) throw py::value_error("concat needs one length for each piece");
    const auto k = static_cast<int>(pieces.size());
    std::vector<const void*> addresses;
    for (const uintptr_t piece : pieces) addresses.push_back(at<const void>(piece));
    check(zg::concat(addresses.data(), lengths.data(), k, at<int64_t>(counts), cap, row_bytes, at<void>(out),
                     stream_at(stream)),
          "concat", {{"pieces", k}, {"cap", cap}, {"row_bytes", row_bytes}});
  });

  m.def("index_add", [](uintptr_t index, int id_bytes, uintptr_t source, int dtype, uintptr_t n, int64_t length,
                        int64_t rows, int64_t width, uintptr_t out, uintptr_t stream) {
    check(zg::index_add(at<void>(index), id_bytes, at<void>(source), static_cast<zg::Dtype>(dtype), at<int64_t>(n),
                        length, rows, width, at<void>(out), stream_at(stream)),
          "index_add",
          {{"id_bytes", id_bytes}, {"dtype", dtype}, {"length", length}, {"rows", rows}, {"width", width}});
  });

  m.def("index_put", [](uintptr_t self, int64_t rows, uintptr_t index, int id_bytes, uintptr_t values, uintptr_t n,
                        int64_t length, int64_t row_bytes, uintptr_t out, uintptr_t stream) {
    check(zg::index_put(at<void>(self), rows, at<void>(index), id_bytes, at<void>(values), at<int64_t>(n), length,
                        row_bytes, at<void>(out), stream_at(stream)),
          "index_put", {{"rows", rows}, {"id_bytes", id_bytes}, {"length", length}, {"row_bytes", row_bytes}});
  });

  m.def("pack_bits", [](uintptr_t flags, int64_t length, uintptr_t words, uintptr_t stream) {
    check(zg::pack_bits(at<uint8_t>(flags), length, at<void>(words), stream_at(stream)), "pack_bits",
          {{"length", length}});
  });

  m.def("publish", [](uintptr_t metadata, int64_t size, int64_t checks, uintptr_t launch, uintptr_t published,
                      uintptr_t stream) {
    check(zg::publish(at<int64_t>(metadata), size, checks, at<int64_t>(launch), at<int64_t>(published),
                      stream_at(stream)),
          "publish", {{"size", size}, {"checks", checks}});
  });

  m.def("await_record", &await_record, py::arg("record"), py::arg("launch"), py::arg("stream"), py::arg("timeout"),
        "Wait, without the GIL, until the host-mapped record shows the launch id. LaunchError: the "
        "stream failed, or it is idle and the record was never written, or `timeout` seconds went by.");
}
