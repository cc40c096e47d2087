#include "current.h"

namespace sim {
namespace {

thread_local int this_device = 0;
thread_local int64_t this_stream[kMaxDevices] = {};

}  // namespace

int current_device() { return this_device; }

void check_device(int device) {
  TORCH_CHECK(device >= 0 && device < config().devices, "sim: invalid device ordinal ", device,
              " (device_count is ", config().devices, ")");
}

void set_current_device(int device) {
  check_device(device);
  this_device = device;
}

void set_current_device_unchecked(int device) noexcept { this_device = device; }

int index_of(Device device) { return device.has_index() ? device.index() : this_device; }

int64_t current_stream_id(int device) { return this_stream[device]; }

void set_current_stream_id(int device, int64_t id) { this_stream[device] = id; }

SimStream* current_stream(int device) { return stream_at(device, this_stream[device]); }

}  // namespace sim
