#include "streams.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <new>
#include <thread>

namespace sim {
namespace {

using Micros = std::chrono::duration<double, std::micro>;

double real_time_us() { return Micros(std::chrono::steady_clock::now() - runtime().start).count(); }

void sleep_until_us(double time_us) {
  const auto delta =
      std::chrono::duration_cast<std::chrono::steady_clock::duration>(Micros(time_us));
  std::this_thread::sleep_until(runtime().start + delta);
}

bool threaded() { return config().mode == Mode::kThread; }

// Runs the stream's first task on this thread. The stream is not busy, its queue not empty.
void run_first(Lock& lock, SimStream* s) {
  s->busy = true;
  Task task = std::move(s->queue.front());
  s->queue.pop_front();
  if (task.wait_for) {
    wait_until(lock, task.wait_for->stream, task.wait_for->position);
    s->clock_us = std::max(s->clock_us, task.wait_for->time_us);
  }
  double start = std::max(s->clock_us, task.queued_at_us);
  if (threaded()) start = std::max(start, real_time_us());
  if (task.engine) {
    start = std::max(start, task.engine->free_at_us);
    task.engine->free_at_us = start + task.cost_us;
  }
  double end = start + task.cost_us;

  lock.unlock();
  if (threaded() && task.cost_us > 0) sleep_until_us(end);
  std::exception_ptr error;
  try {
    if (task.body) task.body();
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  runtime().finished.push_back(std::move(task.body));

  if (error && !s->error) s->error = error;
  if (threaded()) end = std::max(end, real_time_us());
  s->clock_us = end;
  if (task.stamp) task.stamp->time_us = end;
  if (runtime().tracing && *task.kind)
    runtime().trace.push_back({task.kind, s->device, s->id, task.bytes, start, end});
  s->done++;
  s->busy = false;
  runtime().changed.notify_all();
}

std::vector<SimStream*> streams_of(int device) {
  std::vector<SimStream*> all;
  for (auto& s : runtime().devices[device].streams) all.push_back(s.get());
  return all;
}

// The tasks that hardware would be free to run now: first in their stream, waiting for nothing.
std::vector<SimStream*> ready_streams() {
  std::vector<SimStream*> ready;
  for (int d = 0; d < kMaxDevices; d++) {
    for (auto& s : runtime().devices[d].streams) {
      if (s->busy || s->queue.empty()) continue;
      const auto& wait = s->queue.front().wait_for;
      if (!wait || wait->stream->done >= wait->position) ready.push_back(s.get());
    }
  }
  return ready;
}

// Mode random: at each step of the host, some ready tasks of any stream run.
void random_step(Lock& lock) {
  auto& rt = runtime();
  if (config().mode != Mode::kRandom || rt.scheduling) return;
  rt.scheduling = true;
  while (rt.scheduler() % 4 == 0) {
    auto ready = ready_streams();
    if (ready.empty()) break;
    run_first(lock, ready[rt.scheduler() % ready.size()]);
  }
  rt.scheduling = false;
}

void start_worker(SimStream* s) {
  s->has_worker = true;
  std::thread([s] {
    at::init_num_threads();  // as many as the host's kernels use: sums divided alike are equal
    Lock lock(runtime().mutex);
    for (;;) {
      runtime().changed.wait(lock, [&] { return threaded() && !s->queue.empty() && !s->busy; });
      run_first(lock, s);
    }
  }).detach();
}

}  // namespace

Runtime& runtime() {
  static auto* instance = new Runtime;  // never destroyed: workers outlive static objects
  return *instance;
}

double host_time_us() { return threaded() ? real_time_us() : runtime().host_clock_us; }

SimStream* stream_at(int device, int64_t id) {
  auto& streams = runtime().devices[device].streams;
  while (static_cast<int64_t>(streams.size()) <= id) {
    auto s = std::make_unique<SimStream>();
    s->device = device;
    s->id = static_cast<int64_t>(streams.size());
    streams.push_back(std::move(s));
  }
  return streams[id].get();
}

int64_t& counter(int device, Counter which) { return runtime().devices[device].counters[which]; }

uint64_t enqueue(Lock& lock, SimStream* s, Task task) {
  task.queued_at_us = host_time_us();
  const uint64_t position = ++s->submitted;
  if (task.stamp) {
    task.stamp->stream = s;
    task.stamp->position = position;
  }
  s->queue.push_back(std::move(task));
  if (threaded()) {
    if (!s->has_worker) start_worker(s);
    runtime().changed.notify_all();
  } else if (config().mode == Mode::kSync) {
    wait_until(lock, s, position);
  }
  random_step(lock);
  discard_finished(lock);
  return position;
}

void wait_until(Lock& lock, SimStream* s, uint64_t position) {
  while (s->done < position) {
    if (threaded() || s->busy) {
      runtime().changed.wait(lock);
    } else {
      run_first(lock, s);
    }
  }
}

void host_sync(Lock& lock, SimStream* s, uint64_t position) {
  random_step(lock);
  wait_until(lock, s, position);
  runtime().host_clock_us = std::max(runtime().host_clock_us, s->clock_us);
  counter(s->device, kHostSyncs)++;
  discard_finished(lock);
  if (!s->error) return;
  auto error = s->error;
  s->error = nullptr;
  lock.unlock();
  std::rethrow_exception(error);
}

void discard_finished(Lock& lock) {
  std::vector<std::function<void()>> finished;
  finished.swap(runtime().finished);
  if (finished.empty()) return;
  lock.unlock();
  finished.clear();
  lock.lock();
}

void host_sync_device(Lock& lock, int device) {
  stream_at(device, 0);  // a device that was never used is synchronised, too
  for (auto* s : streams_of(device)) host_sync(lock, s, s->submitted);
}

void drain(Lock& lock) {
  for (int d = 0; d < kMaxDevices; d++)
    for (auto* s : streams_of(d)) wait_until(lock, s, s->submitted);
  discard_finished(lock);
}

void start_afresh(uint32_t seed) {
  auto& rt = runtime();
  rt.host_clock_us = 0;
  rt.start = std::chrono::steady_clock::now();
  rt.scheduler.seed(seed);
  rt.trace.clear();
  for (auto& device : rt.devices) {
    device.h2d = device.d2h = device.p2p = CopyEngine{};
    std::fill(std::begin(device.counters), std::end(device.counters), 0);
    for (auto& s : device.streams) {
      s->clock_us = 0;
      s->error = nullptr;
    }
  }
}

void settle_before_fork() {
  Lock lock(runtime().mutex);
  if (threaded()) drain(lock);
}

void repair_after_fork() {
  auto& rt = runtime();
  new (&rt.mutex) std::mutex;
  new (&rt.changed) std::condition_variable;
  if (threaded()) config().mode = Mode::kLazy;
  for (auto& device : rt.devices) {
    for (auto& s : device.streams) {
      if (s->busy) s->done++;
      s->busy = s->has_worker = false;
    }
  }
  rt.scheduling = false;
}

}  // namespace sim
