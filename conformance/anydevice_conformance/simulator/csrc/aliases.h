// A sim tensor seen as a CPU tensor over the same bytes, and how sim tensors are made.
#pragma once

#include <utility>

#include "current.h"

namespace sim {

// Makes CPU (or, for shapes only, Meta) aliases. One tensor gets one alias, since kernels ask whether
// they write where they read; and tensors that share a storage get aliases that share one. An alias does not keep the memory alive: that
// is the stream-ordered cache's business, as on hardware.
class Aliaser {
 public:
  explicit Aliaser(bool meta = false) : meta_(meta) {}
  Tensor operator()(const Tensor& t);

 private:
  Tensor make_alias(const Tensor& t);
  Storage alias_storage(StorageImpl* storage);

  bool meta_;
  c10::SmallVector<std::pair<const c10::TensorImpl*, Tensor>, 8> tensors_;
  c10::SmallVector<std::pair<StorageImpl*, Storage>, 8> storages_;
};

inline Tensor cpu_alias(const Tensor& t) { return Aliaser()(t); }

Tensor new_sim_tensor(at::IntArrayRef size, at::IntArrayRef stride, c10::ScalarType dtype,
                      int device);

// Gives a storage a new size in bytes; what it holds is kept.
void resize_storage(StorageImpl* storage, size_t bytes);

}  // namespace sim
