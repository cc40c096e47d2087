// Random numbers: a CPU generator behind each device's face, so that a seed gives what the CPU
// gives.
#pragma once

#include <c10/core/GeneratorImpl.h>

#include "streams.h"

namespace sim {

class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(DeviceIndex device);
  static c10::DeviceType device_type() { return kDeviceType; }

  void set_current_seed(uint64_t seed) override;
  uint64_t current_seed() const override { return inner_.current_seed(); }
  uint64_t seed() override { return inner_.seed(); }
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  void set_offset(uint64_t) override;
  uint64_t get_offset() const override;

  const at::Generator& inner() const { return inner_; }

 private:
  Generator* clone_impl() const override;
  // Queued kernels draw when they run: let them, before the state is read or set.
  void settle() const;

  at::Generator inner_;
};

// The device's own; of the current device where `device` is negative.
const at::Generator& default_generator(int device);
// The CPU generator inside one of ours; undefined for any other.
at::Generator inner_generator(const at::Generator& generator);

}  // namespace sim
