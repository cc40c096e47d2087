// A sim tensor seen as a CPU tensor over the same bytes, and how sim tensors are made.
#pragma once

#include <utility>

#include "current.h"

namespace sim {

// Makes CPU (or, for shapes only, Meta) aliases. Tensors that share a storage get aliases that
// share one, so that kernels see overlap as it is. An alias does not keep the memory alive: that
// is the stream-ordered cache's business, as on hardware.
class Aliaser {
 public:
  explicit Aliaser(bool meta = false) : meta_(meta) {}
  Tensor operator()(const Tensor& t);

 private:
  Storage alias_storage(StorageImpl* storage);

  bool meta_;
  c10::SmallVector<std::pair<StorageImpl*, Storage>, 8> seen_;
};

inline Tensor cpu_alias(const Tensor& t) { return Aliaser()(t); }

Tensor new_sim_tensor(at::IntArrayRef size, at::IntArrayRef stride, c10::ScalarType dtype,
                      int device);

// Gives a storage a new size in bytes; what it holds is kept.
void resize_storage(StorageImpl* storage, size_t bytes);

}  // namespace sim
