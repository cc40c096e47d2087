// This thread's current device, and its current stream on each device.
#pragma once

#include <c10/core/Stream.h>

#include "streams.h"

namespace sim {

int current_device();
// Raises for an index that no device has.
void check_device(int device);
void set_current_device(int device);
void set_current_device_unchecked(int device) noexcept;
// The index that a torch.device names; the current one where it names none.
int index_of(Device device);

int64_t current_stream_id(int device);
void set_current_stream_id(int device, int64_t id);
// The runtime's mutex is held.
SimStream* current_stream(int device);

inline c10::Stream torch_stream(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, device_at(device), id);
}

}  // namespace sim
