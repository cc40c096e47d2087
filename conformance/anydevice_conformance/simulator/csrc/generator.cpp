#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>

#include <vector>

#include "current.h"

namespace sim {

Generator::Generator(DeviceIndex device)
    : GeneratorImpl(Device(kDeviceType, device), c10::DispatchKeySet(kDispatchKey)),
      inner_(at::detail::createCPUGenerator()) {}

void Generator::settle() const {
  Lock lock(runtime().mutex);
  for (size_t i = 0; i < runtime().devices[device_.index()].streams.size(); i++) {
    auto* s = stream_at(device_.index(), static_cast<int64_t>(i));
    wait_until(lock, s, s->submitted);
  }
}

void Generator::set_current_seed(uint64_t seed) {
  settle();
  inner_.set_current_seed(seed);
}

void Generator::set_state(const c10::TensorImpl& state) {
  settle();
  inner_.unsafeGetGeneratorImpl()->set_state(state);
}

c10::intrusive_ptr<c10::TensorImpl> Generator::get_state() const {
  settle();
  return inner_.unsafeGetGeneratorImpl()->get_state();
}

void Generator::set_offset(uint64_t) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "sim: a generator has no offset, only a state");
}

uint64_t Generator::get_offset() const {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "sim: a generator has no offset, only a state");
}

Generator* Generator::clone_impl() const {
  auto* copy = new Generator(device_.index());
  copy->inner_ = inner_.clone();
  return copy;
}

const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < kMaxDevices; i++)
      made->push_back(at::make_generator<Generator>(static_cast<DeviceIndex>(i)));
    return made;
  }();
  return (*all)[device < 0 ? current_device() : device];
}

at::Generator inner_generator(const at::Generator& generator) {
  auto* ours = dynamic_cast<Generator*>(generator.unsafeGetGeneratorImpl());
  return ours ? ours->inner() : at::Generator();
}

}  // namespace sim
