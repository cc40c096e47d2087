#include "device_allocator.h"

#include <cstdlib>
#include <cstring>

namespace sim {
namespace {

constexpr size_t kGranularity = 512;  // bytes, as CUDA's allocator
constexpr size_t kAlignment = 64;
constexpr int kPoison = 0xFF;  // NaN as a float, -1 as an int

void add(c10::CachingAllocator::StatArray& stat, size_t n) { stat[0].increase(n); }
void subtract(c10::CachingAllocator::StatArray& stat, size_t n) { stat[0].decrease(n); }

template <class F>
void for_each_stat(at::CachingDeviceAllocator::DeviceStats& s, F f) {
  for (auto* array : {&s.allocation, &s.segment, &s.active, &s.allocated_bytes, &s.reserved_bytes,
                      &s.active_bytes, &s.requested_bytes})
    f((*array)[0]);
}

bool others_are_idle(const SimStream* stream) {
  for (auto& device : runtime().devices)
    for (auto& other : device.streams)
      if (other.get() != stream && !other->idle()) return false;
  return true;
}

}  // namespace

DeviceAllocator& device_allocator() {
  static auto* instance = new DeviceAllocator;  // never destroyed: tensors outlive static objects
  return *instance;
}

void DeviceAllocator::delete_block(void* block) {
  if (block) device_allocator().free(static_cast<Block*>(block));
}

void DeviceAllocator::copy_data(void* to, const void* from, size_t bytes) const {
  default_copy_data(to, from, bytes);
}

c10::DataPtr DeviceAllocator::allocate(size_t bytes) {
  return allocate_on(bytes, current_device());
}

c10::DataPtr DeviceAllocator::allocate_on(size_t bytes, int device) {
  check_device(device);
  if (bytes == 0) return {nullptr, nullptr, &delete_block, device_at(device)};
  const size_t size = (bytes + kGranularity - 1) / kGranularity * kGranularity;
  Lock lock(runtime().mutex);
  auto& pool = pools_[device];
  auto* stream = current_stream(device);
  reclaim(lock, pool);
  Block* block = take_cached(lock, pool, stream, size);
  if (!block) block = take_new(lock, pool, stream, size, bytes);
  pool.allocated += size;
  add(pool.stats.allocated_bytes, size);
  add(pool.stats.active_bytes, size);
  add(pool.stats.requested_bytes, bytes);
  add(pool.stats.allocation, 1);
  add(pool.stats.active, 1);
  counter(device, kAllocs)++;
  return {block->memory, block, &delete_block, device_at(device)};
}

Block* DeviceAllocator::take_cached(Lock& lock, Pool& pool, SimStream* stream, size_t size) {
  auto found = pool.free.find({stream, size});
  if (found == pool.free.end() || found->second.empty()) return nullptr;
  Block* block = found->second.back();
  found->second.pop_back();
  if (!block->poisoned) poison(lock, block);
  return block;
}

Block* DeviceAllocator::take_new(Lock& lock, Pool& pool, SimStream* stream, size_t size,
                                 size_t asked) {
  const int device = stream->device;
  const size_t capacity = config().capacity[device];
  if (pool.reserved + size > capacity) {  // as CUDA does: give the cache back and try once more
    pool.stats.num_alloc_retries++;
    drain(lock);
    reclaim(lock, pool);
    drain(lock);
    release(pool, device);
  }
  if (pool.reserved + size > capacity) {
    pool.stats.num_ooms++;
    const size_t allocated = pool.allocated, reserved = pool.reserved;
    lock.unlock();
    TORCH_CHECK_WITH(OutOfMemoryError, false, "SIM out of memory. Tried to allocate ", asked,
                     " bytes. Device ", device, " has a total capacity of ", capacity,
                     " bytes of which ", capacity - std::min(capacity, reserved),
                     " bytes is free. ", allocated, " bytes is allocated and ",
                     reserved - allocated, " bytes is reserved but unallocated.");
  }
  auto* block = new Block{nullptr, size, device, stream, {}};
  TORCH_CHECK(posix_memalign(&block->memory, kAlignment, size) == 0, "sim: no host memory is left");
  if (config().poison) std::memset(block->memory, kPoison, size);
  pool.reserved += size;
  add(pool.stats.reserved_bytes, size);
  add(pool.stats.segment, 1);
  pool.stats.num_device_alloc++;
  counter(device, kDeviceAllocs)++;
  return block;
}

void DeviceAllocator::free(Block* block) {
  Lock lock(runtime().mutex);
  auto& pool = pools_[block->device];
  pool.allocated -= block->size;
  subtract(pool.stats.allocated_bytes, block->size);
  subtract(pool.stats.active_bytes, block->size);
  subtract(pool.stats.allocation, 1);
  subtract(pool.stats.active, 1);
  counter(block->device, kFrees)++;
  block->used_on.erase(block->stream);
  if (block->used_on.empty()) {
    to_free_list(lock, pool, block);
    return;
  }
  Pending pending{block, {}};
  for (auto* s : block->used_on) pending.waits.push_back({s, s->submitted});
  pool.pending.push_back(std::move(pending));
}

// Moves blocks whose other streams are through with them to the free list.
void DeviceAllocator::reclaim(Lock& lock, Pool& pool) {
  std::vector<Block*> ready;
  for (size_t i = 0; i < pool.pending.size();) {
    bool reached = true;
    for (auto& [stream, position] : pool.pending[i].waits) reached &= stream->done >= position;
    if (reached) {
      ready.push_back(pool.pending[i].block);
      pool.pending.erase(pool.pending.begin() + i);
    } else {
      i++;
    }
  }
  for (auto* block : ready) to_free_list(lock, pool, block);
}

void DeviceAllocator::to_free_list(Lock& lock, Pool& pool, Block* block) {
  block->used_on.clear();
  block->poisoned = !config().poison;
  pool.free[{block->stream, block->size}].push_back(block);
  if (!block->poisoned && others_are_idle(block->stream)) poison(lock, block);
}

void DeviceAllocator::poison(Lock& lock, Block* block) {
  block->poisoned = true;
  Task task;  // in stream order, so that whoever reads freed memory in time still reads it whole
  task.body = [memory = block->memory, size = block->size] { std::memset(memory, kPoison, size); };
  enqueue(lock, block->stream, std::move(task));
}

// Only blocks of idle streams: another thread may have queued a task that writes one just now.
void DeviceAllocator::release(Pool& pool, int device) {
  for (auto& [key, blocks] : pool.free) {
    if (!key.first->idle()) continue;
    for (auto* block : blocks) {
      pool.reserved -= block->size;
      subtract(pool.stats.reserved_bytes, block->size);
      subtract(pool.stats.segment, 1);
      pool.stats.num_device_free++;
      counter(device, kDeviceFrees)++;
      std::free(block->memory);
      delete block;
    }
    blocks.clear();
  }
}

void DeviceAllocator::release_all(Lock& lock) {
  drain(lock);
  for (auto& pool : pools_) reclaim(lock, pool);
  drain(lock);
  for (int d = 0; d < kMaxDevices; d++) release(pools_[d], d);
}

void DeviceAllocator::emptyCache(c10::MempoolId_t) {
  Lock lock(runtime().mutex);
  for (int d = 0; d < config().devices; d++) counter(d, kCacheClears)++;
  release_all(lock);
}

void DeviceAllocator::recordStream(const c10::DataPtr& pointer, c10::Stream stream) {
  if (!pointer.get_context()) return;
  Lock lock(runtime().mutex);
  auto* block = static_cast<Block*>(pointer.get_context());
  block->used_on.insert(stream_at(stream.device_index(), stream.id()));
}

at::CachingDeviceAllocator::DeviceStats DeviceAllocator::getDeviceStats(DeviceIndex device) {
  check_device(device);
  Lock lock(runtime().mutex);
  return pools_[device].stats;
}

void DeviceAllocator::resetAccumulatedStats(DeviceIndex device) {
  check_device(device);
  Lock lock(runtime().mutex);
  auto& stats = pools_[device].stats;
  for_each_stat(stats, [](auto& stat) { stat.reset_accumulated(); });
  stats.num_alloc_retries = stats.num_ooms = 0;
}

void DeviceAllocator::resetPeakStats(DeviceIndex device) {
  check_device(device);
  Lock lock(runtime().mutex);
  for_each_stat(pools_[device].stats, [](auto& stat) { stat.reset_peak(); });
}

std::pair<size_t, size_t> DeviceAllocator::getMemoryInfo(DeviceIndex device) {
  check_device(device);
  Lock lock(runtime().mutex);
  const size_t capacity = config().capacity[device];
  return {capacity - std::min(capacity, pools_[device].reserved), capacity};
}

}  // namespace sim
