// Streams: queues of tasks that run in order, each at the moment that the mode allows.
//
// One mutex guards everything here; it is released while a task's body runs. A thread may wait, for
// the mutex or for a stream, with Python's GIL held. So neither the mutex's holder nor a running
// task may need the GIL: the tensors that a task holds, which Python may have seen, die only when a
// host thread that runs no task calls discard_finished.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "config.h"

namespace sim {

enum Counter {
  kKernels,
  kHostSyncs,
  // Each kind of copy is a pair: how many, then how many bytes.
  kH2dCopies,
  kH2dBytes,
  kD2hCopies,
  kD2hBytes,
  kP2pCopies,
  kP2pBytes,
  kD2dCopies,
  kD2dBytes,
  kAllocs,        // blocks that tensors asked for
  kFrees,         // blocks that tensors gave back
  kDeviceAllocs,  // of the requests, those that took new memory from the device
  kDeviceFrees,   // blocks given back to the device
  kCacheClears,   // calls to empty_cache
  kCounterCount
};
constexpr const char* kCounterNames[kCounterCount] = {
    "kernels",   "host_syncs", "h2d_copies",    "h2d_bytes",    "d2h_copies",
    "d2h_bytes", "p2p_copies", "p2p_bytes",     "d2d_copies",   "d2d_bytes",
    "allocs",    "frees",      "device_allocs", "device_frees", "cache_clears"};

struct SimStream;

// One recording of an event: a position in a stream, and the time at which it was reached.
struct Recording {
  SimStream* stream = nullptr;
  uint64_t position = 0;
  double time_us = 0;
};

// A copy engine: copies in one direction go one after another, whatever their streams.
struct CopyEngine {
  double free_at_us = 0;
};

struct Task {
  std::function<void()> body;
  double cost_us = 0;
  CopyEngine* engine = nullptr;
  std::shared_ptr<Recording> wait_for;  // runs only after this
  std::shared_ptr<Recording> stamp;     // is this, when it has run
  double queued_at_us = 0;
  const char* kind = "";  // as the trace names it; empty for events, which are no work
  size_t bytes = 0;
};

struct SimStream {
  int device;
  int64_t id;
  std::deque<Task> queue;
  uint64_t submitted = 0, done = 0;
  bool busy = false;  // its first task is running, on some thread
  bool has_worker = false;
  double clock_us = 0;
  std::exception_ptr error;  // the first, until a host synchronisation raises it

  bool idle() const { return done == submitted; }
};

struct TraceRecord {
  std::string kind;
  int device;
  int64_t stream;
  size_t bytes;
  double start_us, end_us;
};

struct DeviceState {
  std::vector<std::unique_ptr<SimStream>> streams;  // the id is the index; 0 is the default stream
  int next_pooled = 0;
  CopyEngine h2d, d2h, p2p;
  int64_t counters[kCounterCount] = {};
};

struct Runtime {
  std::mutex mutex;
  std::condition_variable changed;
  DeviceState devices[kMaxDevices];
  double host_clock_us = 0;
  std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
  std::mt19937 scheduler{0};
  bool scheduling = false;
  std::vector<std::function<void()>> finished;  // bodies that have run, with the tensors they hold
  bool tracing = false;
  std::vector<TraceRecord> trace;
};
Runtime& runtime();

using Lock = std::unique_lock<std::mutex>;

// All below are called with the runtime's mutex held by `lock`, and may release it on the way.

double host_time_us();
SimStream* stream_at(int device, int64_t id);
int64_t& counter(int device, Counter which);

// Queues a task; returns its position, for wait_until and host_sync.
uint64_t enqueue(Lock& lock, SimStream* stream, Task task);
// Has the stream reach a position.
void wait_until(Lock& lock, SimStream* stream, uint64_t position);
// The host waits for a position: counted, and where an error of a queued task is raised.
void host_sync(Lock& lock, SimStream* stream, uint64_t position);
void host_sync_device(Lock& lock, int device);
// Drops what finished tasks hold.
void discard_finished(Lock& lock);
// Runs all that is queued anywhere. Not counted, raises nothing.
void drain(Lock& lock);
// Forgets times, counters and errors, with all streams drained.
void start_afresh(uint32_t seed);
// With workers, has them finish what is queued: a forked child does not have them.
void settle_before_fork();
// In a forked child no other thread goes on: what one was running is lost.
void repair_after_fork();

}  // namespace sim
