// What a test can set, and the names that every file here shares.
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <cstdint>

namespace sim {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Storage;
using c10::StorageImpl;

constexpr auto kDeviceType = c10::DeviceType::PrivateUse1;
constexpr auto kDispatchKey = c10::DispatchKey::PrivateUse1;
constexpr int kMaxDevices = 16;

// When a queued task runs. The values are known to Python (options.py).
enum class Mode : int {
  kSync = 0,    // at once
  kLazy = 1,    // when something waits for its stream: the latest moment that is allowed
  kThread = 2,  // on a worker thread of its stream, taking real time
  kRandom = 3,  // at a moment that a seeded scheduler picks
};

struct Config {
  int devices = 2;
  size_t capacity[kMaxDevices] = {};  // bytes
  Mode mode = Mode::kLazy;
  bool async_kernels = true;
  bool poison = true;  // memory that is new or freed reads as NaN (bytes 0xFF)
  // Bandwidths in bytes a microsecond, which is MB/s.
  double h2d = 12e3, d2h = 12e3, p2p = 20e3, hbm = 1e6;
  // Costs in microseconds: a copy's start, a kernel, and a launch by the host.
  double copy_latency = 10, kernel = 5, launch = 2;
};

inline Config& config() {
  static Config instance;
  return instance;
}

inline Device device_at(int index) { return Device(kDeviceType, static_cast<DeviceIndex>(index)); }

inline bool is_sim(const Tensor& t) { return t.defined() && t.device().type() == kDeviceType; }

}  // namespace sim
