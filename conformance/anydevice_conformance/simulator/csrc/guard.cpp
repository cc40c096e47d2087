// torch's device guard: devices, streams and events, as every part of torch asks for them.
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "current.h"
#include "device_allocator.h"

namespace sim {
namespace {

constexpr int kPooledStreams = 32;  // new streams take turns on these, as on CUDA

struct SimEvent {
  std::shared_ptr<Recording> recording;
};

std::shared_ptr<Recording> recording_of(void* event) {
  return event ? static_cast<SimEvent*>(event)->recording : nullptr;
}

bool reached(const Recording& r) {
  Lock lock(runtime().mutex);
  return r.stream->done >= r.position;
}

SimStream* stream_of(const c10::Stream& s) { return stream_at(s.device_index(), s.id()); }

struct SimGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDeviceType; }

  // Devices. Torch's autograd engine asks once, at the first backward, and makes a queue for each:
  // a later machine may have more.
  DeviceIndex deviceCount() const noexcept override { return kMaxDevices; }
  Device getDevice() const override { return device_at(current_device()); }
  void setDevice(Device d) const override {
    // The engine's threads set the devices that there are not yet, too. What uses a device checks it.
    if (d.index() >= kMaxDevices) check_device(d.index());
    if (d.has_index()) set_current_device_unchecked(d.index());
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.has_index()) set_current_device_unchecked(d.index());
  }
  Device exchangeDevice(Device d) const override {
    auto old = getDevice();
    setDevice(d);
    return old;
  }
  void synchronizeDevice(const DeviceIndex d) const override {
    check_device(d);
    Lock lock(runtime().mutex);
    host_sync_device(lock, d);
  }

  // Streams.
  c10::Stream getStream(Device d) const override {
    const int device = index_of(d);
    check_device(device);
    return torch_stream(device, current_stream_id(device));
  }
  c10::Stream getDefaultStream(Device d) const override { return torch_stream(index_of(d), 0); }
  c10::Stream getNewStream(Device d, int = 0) const override {
    const int device = index_of(d);
    check_device(device);
    Lock lock(runtime().mutex);
    const int64_t id = 1 + (runtime().devices[device].next_pooled++ % kPooledStreams);
    stream_at(device, id);
    return torch_stream(device, id);
  }
  c10::Stream getStreamFromGlobalPool(Device d, bool = false) const override {
    return getNewStream(d);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    const int device = s.device_index();
    auto old = torch_stream(device, current_stream_id(device));
    set_current_stream_id(device, s.id());
    return old;
  }
  bool queryStream(const c10::Stream& s) const override {
    Lock lock(runtime().mutex);
    return stream_of(s)->idle();
  }
  void synchronizeStream(const c10::Stream& s) const override {
    Lock lock(runtime().mutex);
    host_sync(lock, stream_of(s), stream_of(s)->submitted);
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override {
    device_allocator().recordStream(p, s);
  }

  // Events. One that was never recorded is complete, and nothing waits for it.
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<SimEvent*>(event);
  }
  void record(void** event, const c10::Stream& s, const DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new SimEvent;
    Task task;
    task.stamp = std::make_shared<Recording>();
    static_cast<SimEvent*>(*event)->recording = task.stamp;
    Lock lock(runtime().mutex);
    enqueue(lock, stream_of(s), std::move(task));
  }
  void block(void* event, const c10::Stream& s) const override {
    Task task;
    task.wait_for = recording_of(event);
    if (!task.wait_for) return;
    Lock lock(runtime().mutex);
    enqueue(lock, stream_of(s), std::move(task));
  }
  bool queryEvent(void* event) const override {
    auto recording = recording_of(event);
    return !recording || reached(*recording);
  }
  void synchronizeEvent(void* event) const override {
    auto recording = recording_of(event);
    if (!recording) return;
    Lock lock(runtime().mutex);
    host_sync(lock, recording->stream, recording->position);
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    auto a = recording_of(first), b = recording_of(second);
    TORCH_CHECK(a && b, "sim: both events must be recorded before their elapsed time is asked");
    TORCH_CHECK(reached(*a) && reached(*b),
                "sim: both events must be completed before their elapsed time is asked");
    return (b->time_us - a->time_us) / 1e3;  // torch wants milliseconds
  }
};

}  // namespace
}  // namespace sim

namespace at::detail {
using sim::SimGuard;
C10_REGISTER_GUARD_IMPL(PrivateUse1, SimGuard)
}  // namespace at::detail
