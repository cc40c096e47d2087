// What torch asks of the backend as a whole: torch.accelerator, generators, pinned memory.
#include "hooks.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "aliases.h"
#include "generator.h"
#include "pinned_allocator.h"

namespace sim {
namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex d) const override { return d < deviceCount(); }
  void init() const override {}

  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(config().devices); }
  void setCurrentDevice(DeviceIndex d) const override { set_current_device(d); }
  DeviceIndex getCurrentDevice() const override {
    return static_cast<DeviceIndex>(current_device());
  }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    const auto old = getCurrentDevice();
    if (d >= 0) set_current_device(d);
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  // A pointer does not say whose it is: all devices live in host memory.
  Device getDeviceFromPtr(void*) const override { return device_at(current_device()); }

  const at::Generator& getDefaultGenerator(DeviceIndex d) const override {
    return default_generator(d);
  }
  at::Generator getNewGenerator(DeviceIndex d = -1) const override {
    return at::make_generator<Generator>(d < 0 ? getCurrentDevice() : d);
  }

  bool isPinnedPtr(const void* p) const override { return pinned_allocator().owns(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  void resizePrivateUse1Bytes(const Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};

}  // namespace

void register_hooks() {
  static auto* hooks = new Hooks;
  at::RegisterPrivateUse1HooksInterface(hooks);
}

}  // namespace sim
