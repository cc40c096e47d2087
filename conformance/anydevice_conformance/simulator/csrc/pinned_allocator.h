// Page-locked host memory: ordinary memory whose addresses are remembered, with an optional limit.
#pragma once

#include <ATen/core/CachingHostAllocator.h>

#include <map>
#include <mutex>

#include "config.h"

namespace sim {

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override { return &delete_memory; }
  void copy_data(void* to, const void* from, size_t bytes) const override;

  bool record_event(void*, void*, c10::Stream) override {
    return true;
  }  // queued copies hold the tensor
  void empty_cache() override {}  // there is no cache
  at::HostStats get_stats() override;
  void reset_accumulated_stats() override;
  void reset_peak_stats() override;

  bool owns(const void* address);
  size_t bytes();
  void set_limit(size_t bytes);
  // Held over a fork, so that the child finds the addresses whole.
  std::mutex& mutex() { return mutex_; }

 private:
  static void delete_memory(void* memory);
  void free(void* memory);

  std::mutex mutex_;
  std::map<const char*, size_t> live_;
  at::HostStats stats_;
  size_t bytes_ = 0, limit_ = SIZE_MAX;
};

PinnedAllocator& pinned_allocator();

}  // namespace sim
