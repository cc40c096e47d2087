// Device memory: host memory with a cap, kept in a cache, reused in stream order as CUDA's is.
//
// A freed block goes to its stream's free list at once, though tasks that use it may still be
// queued: the next user of the block is queued behind them. A block that another stream uses
// without record_stream can therefore be overwritten under that stream's hands, as on hardware.
// Blocks are not divided: one serves only requests of its own rounded size.
//
// Freed memory is poisoned at once only where no other stream has work left, which might still use
// it as hardware allows: until the block's own stream hands it out again. Else it is poisoned then.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <map>
#include <set>
#include <utility>
#include <vector>

#include "current.h"

namespace sim {

struct Block {
  void* memory;
  size_t size;
  int device;
  SimStream* stream;
  std::set<SimStream*> used_on;  // other streams, by record_stream
  bool poisoned = true;          // or a task that does it is queued
};

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override;
  c10::DataPtr allocate_on(size_t bytes, int device);
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override;

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override;
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override;
  at::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override;
  void resetAccumulatedStats(DeviceIndex device) override;
  void resetPeakStats(DeviceIndex device) override;
  // Free and total bytes. Free is what the cache has not taken.
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override;

  // Gives cached blocks of all devices back. The runtime's mutex is held.
  void release_all(Lock& lock);

 private:
  // A freed block, and the positions that other streams must reach before it can be reused.
  struct Pending {
    Block* block;
    std::vector<std::pair<SimStream*, uint64_t>> waits;
  };
  struct Pool {
    std::map<std::pair<SimStream*, size_t>, std::vector<Block*>> free;
    std::vector<Pending> pending;
    at::CachingDeviceAllocator::DeviceStats stats;
    size_t reserved = 0, allocated = 0;  // bytes
  };

  static void delete_block(void* block);
  void free(Block* block);
  void reclaim(Lock& lock, Pool& pool);
  void to_free_list(Lock& lock, Pool& pool, Block* block);
  void release(Pool& pool, int device);
  Block* take_cached(Lock& lock, Pool& pool, SimStream* stream, size_t size);
  void poison(Lock& lock, Block* block);
  Block* take_new(Lock& lock, Pool& pool, SimStream* stream, size_t size, size_t asked);

  Pool pools_[kMaxDevices];  // guarded by the runtime's mutex
};

DeviceAllocator& device_allocator();

}  // namespace sim
