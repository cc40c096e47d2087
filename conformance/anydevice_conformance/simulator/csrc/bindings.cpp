// The Python module, and what must happen once when it is loaded.
#include <ATen/core/CachingHostAllocator.h>
#include <pthread.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <tuple>

#include "collectives.h"
#include "current.h"
#include "device_allocator.h"
#include "generator.h"
#include "hooks.h"
#include "pinned_allocator.h"

namespace py = pybind11;

namespace sim {
namespace {

void configure(const Config& wanted, uint32_t seed, size_t pinned_limit) {
  {
    Lock lock(runtime().mutex);
    device_allocator().release_all(lock);
    config() = wanted;
    start_afresh(seed);
  }
  for (int d = 0; d < wanted.devices; d++) {
    device_allocator().resetAccumulatedStats(static_cast<DeviceIndex>(d));
    device_allocator().resetPeakStats(static_cast<DeviceIndex>(d));
  }
  pinned_allocator().set_limit(pinned_limit);
  set_current_device(0);
  for (int d = 0; d < kMaxDevices; d++) set_current_stream_id(d, 0);
}

std::map<std::string, int64_t> counters(int device) {
  check_device(device);
  Lock lock(runtime().mutex);
  std::map<std::string, int64_t> result;
  for (int i = 0; i < kCounterCount; i++)
    result[kCounterNames[i]] = counter(device, static_cast<Counter>(i));
  return result;
}

void reset_counters() {
  Lock lock(runtime().mutex);
  for (auto& device : runtime().devices)
    std::fill(std::begin(device.counters), std::end(device.counters), 0);
}

// Runs what is queued and forgets its errors.
void drain_quietly() {
  Lock lock(runtime().mutex);
  drain(lock);
  for (auto& device : runtime().devices)
    for (auto& s : device.streams) s->error = nullptr;
}

using PlainRecord = std::tuple<std::string, int, int64_t, size_t, double, double>;

void start_trace() {
  Lock lock(runtime().mutex);
  runtime().trace.clear();
  runtime().tracing = true;
}

std::vector<PlainRecord> stop_trace() {
  Lock lock(runtime().mutex);
  drain(lock);
  runtime().tracing = false;
  std::vector<PlainRecord> records;
  for (const auto& r : runtime().trace)
    records.emplace_back(r.kind, r.device, r.stream, r.bytes, r.start_us, r.end_us);
  runtime().trace.clear();
  return records;
}

// Both mutexes are held over a fork: the child must not see a queue or a table half changed.
void before_fork() {
  runtime().mutex.lock();
  pinned_allocator().mutex().lock();
}

void after_fork_in_parent() {
  pinned_allocator().mutex().unlock();
  runtime().mutex.unlock();
}

void after_fork_in_child() {
  pinned_allocator().mutex().unlock();
  repair_after_fork();
}

void load_once() {
  c10::SetAllocator(kDeviceType, &device_allocator(), /*priority=*/1);
  at::setHostAllocator(kDeviceType, &pinned_allocator(), /*priority=*/1);
  register_hooks();
  pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

}  // namespace
}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  load_once();
  const auto nogil = py::call_guard<py::gil_scoped_release>();
  m.attr("MAX_DEVICES") = kMaxDevices;

  m.def(
      "configure",
      [](std::vector<size_t> capacity, int mode, uint32_t seed, double h2d, double d2h, double p2p,
         double hbm, double copy_latency, double kernel, double launch, bool poison,
         bool async_kernels, size_t pinned_limit) {
        Config wanted;
        wanted.devices = static_cast<int>(capacity.size());
        TORCH_CHECK(wanted.devices >= 1 && wanted.devices <= kMaxDevices, "sim: 1 to ", kMaxDevices,
                    " devices");
        std::copy(capacity.begin(), capacity.end(), wanted.capacity);
        wanted.mode = static_cast<Mode>(mode);
        wanted.async_kernels = async_kernels;
        wanted.poison = poison;
        wanted.h2d = h2d;
        wanted.d2h = d2h;
        wanted.p2p = p2p;
        wanted.hbm = hbm;
        wanted.copy_latency = copy_latency;
        wanted.kernel = kernel;
        wanted.launch = launch;
        configure(wanted, seed, pinned_limit);
      },
      nogil, py::arg("capacity"), py::arg("mode"), py::arg("seed"), py::arg("h2d"), py::arg("d2h"),
      py::arg("p2p"), py::arg("hbm"), py::arg("copy_latency"), py::arg("kernel"), py::arg("launch"),
      py::arg("poison"), py::arg("async_kernels"), py::arg("pinned_limit"));
  m.def("device_count", [] { return config().devices; });
  m.def("current_device", &current_device);
  m.def("set_device", &set_current_device);
  m.def(
      "synchronize",
      [](int device) {
        check_device(device);
        Lock lock(runtime().mutex);
        host_sync_device(lock, device);
      },
      nogil);
  m.def("drain", &drain_quietly, nogil);
  m.def("settle_before_fork", &settle_before_fork, nogil);
  m.def("empty_cache", [] { device_allocator().emptyCache(); }, nogil);
  m.def(
      "mem_get_info",
      [](int device) { return device_allocator().getMemoryInfo(static_cast<DeviceIndex>(device)); },
      nogil);
  m.def("pinned_bytes", [] { return pinned_allocator().bytes(); }, nogil);
  m.def("default_generator", [](int device) {
    check_device(device);
    return default_generator(device);
  });

  m.def("make_collectives", &make_collectives);
  m.def("counters", &counters, nogil);
  m.def("reset_counters", &reset_counters, nogil);
  m.def(
      "clock_us",
      [] {
        Lock lock(runtime().mutex);
        return host_time_us();
      },
      nogil);
  m.def(
      "advance_clock",
      [](double us) {
        Lock lock(runtime().mutex);
        runtime().host_clock_us += us;
      },
      nogil);
  m.def("start_trace", &start_trace, nogil);
  m.def("stop_trace", &stop_trace, nogil);
}
