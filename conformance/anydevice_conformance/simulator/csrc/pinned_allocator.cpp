#include "pinned_allocator.h"

#include <cstdlib>

#include "streams.h"

namespace sim {

using Guard = std::lock_guard<std::mutex>;

namespace {

// Sources of copies that are done are free, though nobody has dropped them yet.
void discard_finished_copies() {
  Lock lock(runtime().mutex);
  discard_finished(lock);
}

}  // namespace

PinnedAllocator& pinned_allocator() {
  static auto* instance = new PinnedAllocator;  // never destroyed: tensors outlive static objects
  return *instance;
}

void PinnedAllocator::delete_memory(void* memory) {
  if (memory) pinned_allocator().free(memory);
}

c10::DataPtr PinnedAllocator::allocate(size_t bytes) {
  void* memory = nullptr;
  if (bytes) {
    discard_finished_copies();
    Guard guard(mutex_);
    TORCH_CHECK(bytes <= limit_ && bytes_ <= limit_ - bytes,
                "sim: pinned host memory limit reached (", bytes_, " + ", bytes, " > ", limit_,
                " bytes)");
    TORCH_CHECK(posix_memalign(&memory, 64, bytes) == 0, "sim: no host memory is left");
    live_[static_cast<char*>(memory)] = bytes;
    bytes_ += bytes;
    stats_.active_bytes.increase(bytes);
    stats_.allocated_bytes.increase(bytes);
    stats_.allocations.increase(1);
    stats_.active_requests.increase(1);
    stats_.num_host_alloc++;
  }
  return {memory, memory, &delete_memory, Device(c10::DeviceType::CPU)};
}

void PinnedAllocator::free(void* memory) {
  {
    Guard guard(mutex_);
    auto found = live_.find(static_cast<char*>(memory));
    const size_t bytes = found->second;
    live_.erase(found);
    bytes_ -= bytes;
    stats_.active_bytes.decrease(bytes);
    stats_.allocated_bytes.decrease(bytes);
    stats_.allocations.decrease(1);
    stats_.active_requests.decrease(1);
    stats_.num_host_free++;
  }
  std::free(memory);
}

bool PinnedAllocator::owns(const void* address) {
  Guard guard(mutex_);
  const auto* byte = static_cast<const char*>(address);
  auto next = live_.upper_bound(byte);
  if (next == live_.begin()) return false;
  const auto& [start, bytes] = *--next;
  return byte < start + bytes;
}

void PinnedAllocator::copy_data(void* to, const void* from, size_t bytes) const {
  default_copy_data(to, from, bytes);
}

at::HostStats PinnedAllocator::get_stats() {
  Guard guard(mutex_);
  return stats_;
}

void PinnedAllocator::reset_accumulated_stats() {
  Guard guard(mutex_);
  stats_.allocated_bytes.reset_accumulated();
}

void PinnedAllocator::reset_peak_stats() {
  Guard guard(mutex_);
  stats_.allocated_bytes.reset_peak();
}

size_t PinnedAllocator::bytes() {
  discard_finished_copies();
  Guard guard(mutex_);
  return bytes_;
}

void PinnedAllocator::set_limit(size_t bytes) {
  Guard guard(mutex_);
  limit_ = bytes;
}

}  // namespace sim
