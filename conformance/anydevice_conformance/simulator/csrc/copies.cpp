#include "copies.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include "aliases.h"
#include "pinned_allocator.h"

namespace sim {
namespace {

Task copy_task(const char* kind, const Tensor& from, const Tensor& to, double megabytes_per_s,
               double latency_us) {
  Task task;
  task.kind = kind;
  task.bytes = to.numel() * to.element_size();
  task.cost_us = latency_us + task.bytes / megabytes_per_s;
  task.body = [from, to] {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    to.copy_(from);
  };
  return task;
}

// The host launches a copy. `copies` is the first of the pair of counters.
void launch(int device, Counter copies, size_t bytes) {
  runtime().host_clock_us += config().launch;
  counter(device, copies)++;
  counter(device, static_cast<Counter>(copies + 1)) += static_cast<int64_t>(bytes);
}

// `second` waits for what `first` has queued so far.
void order(Lock& lock, SimStream* first, SimStream* second) {
  auto recording = std::make_shared<Recording>();
  Task stamp, wait;
  stamp.stamp = recording;
  wait.wait_for = recording;
  enqueue(lock, first, std::move(stamp));
  enqueue(lock, second, std::move(wait));
}

bool is_pinned(const Tensor& host) { return pinned_allocator().owns(host.storage().data()); }

void within_device(const Tensor& from, const Tensor& to) {
  const int device = to.device().index();
  Aliaser alias;  // one for both: the copy may overlap itself
  const auto source = alias(from), target = alias(to);
  auto task = copy_task("d2d", source, target, config().hbm, config().kernel);
  Lock lock(runtime().mutex);
  launch(device, kD2dCopies, task.bytes);
  enqueue(lock, current_stream(device), std::move(task));
}

// As CUDA: on the source's stream, after what the target's has queued; and the target's waits.
void between_devices(const Tensor& from, const Tensor& to) {
  const int source = from.device().index(), target = to.device().index();
  const auto& c = config();
  auto task = copy_task("p2p", cpu_alias(from), cpu_alias(to), c.p2p, c.copy_latency);
  Lock lock(runtime().mutex);
  task.engine = &runtime().devices[source].p2p;
  launch(source, kP2pCopies, task.bytes);
  auto *out = current_stream(source), *in = current_stream(target);
  order(lock, in, out);
  enqueue(lock, out, std::move(task));
  order(lock, out, in);
}

void host_to_device(const Tensor& from, const Tensor& to, bool non_blocking) {
  TORCH_CHECK(from.device().is_cpu(), "sim: cannot copy from ", from.device());
  const int device = to.device().index();
  Tensor source = from;
  // Only bytes travel: conversion is the host's work, and its result is a pageable copy.
  if (from.scalar_type() != to.scalar_type() || from.sizes() != to.sizes() || !from.is_contiguous())
    source = from.to(to.scalar_type()).expand(to.sizes()).contiguous();
  const bool pinned = is_pinned(source);
  // Pageable memory is staged before the call returns: the host may overwrite it at once.
  if (non_blocking && !pinned && source.is_same(from)) source = source.clone();
  const double bandwidth = pinned ? config().h2d : config().h2d / 2;
  auto task = copy_task(pinned ? "h2d" : "h2d_pageable", source, cpu_alias(to), bandwidth,
                        config().copy_latency);
  Lock lock(runtime().mutex);
  task.engine = &runtime().devices[device].h2d;
  launch(device, kH2dCopies, task.bytes);
  auto* stream = current_stream(device);
  const auto position = enqueue(lock, stream, std::move(task));
  if (!non_blocking) host_sync(lock, stream, position);
}

void device_to_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  TORCH_CHECK(to.device().is_cpu(), "sim: cannot copy to ", to.device());
  const int device = from.device().index();
  const bool pinned = is_pinned(to);
  const double bandwidth = pinned ? config().d2h : config().d2h / 2;
  auto task = copy_task(pinned ? "d2h" : "d2h_pageable", cpu_alias(from), to, bandwidth,
                        config().copy_latency);
  Lock lock(runtime().mutex);
  task.engine = &runtime().devices[device].d2h;
  launch(device, kD2hCopies, task.bytes);
  auto* stream = current_stream(device);
  const auto position = enqueue(lock, stream, std::move(task));
  // As CUDA: a copy to pageable memory has returned only when it is done.
  if (!non_blocking || !pinned) host_sync(lock, stream, position);
}

}  // namespace

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (!is_sim(to)) {
    device_to_host(from, to, non_blocking);
  } else if (!is_sim(from)) {
    host_to_device(from, to, non_blocking);
  } else if (from.device() == to.device()) {
    within_device(from, to);
  } else {
    between_devices(from, to);
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

}  // namespace sim
