#include "aliases.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/DeviceGuard.h>

#include <cstring>

#include "device_allocator.h"

namespace sim {

Storage Aliaser::alias_storage(StorageImpl* storage) {
  for (auto& [original, alias] : storages_)
    if (original == storage) return alias;
  const auto size = StorageImpl::use_byte_size_t();
  auto impl = meta_ ? c10::make_intrusive<StorageImpl>(
                          size, storage->nbytes(), c10::DataPtr(nullptr, Device(c10::kMeta)),
                          c10::GetAllocator(c10::kMeta), /*resizable=*/true)
                    : c10::make_intrusive<StorageImpl>(
                          size, storage->nbytes(),
                          c10::DataPtr(const_cast<void*>(storage->data()), Device(c10::kCPU)),
                          nullptr, /*resizable=*/false);
  storages_.push_back({storage, Storage(std::move(impl))});
  return storages_.back().second;
}

Tensor Aliaser::operator()(const Tensor& t) {
  const auto* impl = t.unsafeGetTensorImpl();
  for (auto& [original, alias] : tensors_)
    if (original == impl) return alias;
  tensors_.push_back({impl, make_alias(t)});
  return tensors_.back().second;
}

Tensor Aliaser::make_alias(const Tensor& t) {
  const auto key = meta_ ? c10::DispatchKey::Meta : c10::DispatchKey::CPU;
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      alias_storage(t.storage().unsafeGetStorageImpl()), c10::DispatchKeySet(key), t.dtype());
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (t.is_conj()) impl->_set_conj(true);
  if (t.is_neg()) impl->_set_neg(true);
  return alias;
}

Tensor new_sim_tensor(at::IntArrayRef size, at::IntArrayRef stride, c10::ScalarType dtype,
                      int device) {
  c10::DeviceGuard guard(device_at(device));
  return at::detail::empty_strided_generic(size, stride, &device_allocator(),
                                           c10::DispatchKeySet(kDispatchKey), dtype);
}

void resize_storage(StorageImpl* storage, size_t bytes) {
  const int device = storage->device().index();
  auto fresh = device_allocator().allocate_on(bytes, device);
  const size_t kept = std::min(bytes, storage->nbytes());
  void *to = fresh.get(), *from = storage->mutable_data();
  if (kept && from) {
    Task task;
    task.body = [to, from, kept] { std::memcpy(to, from, kept); };
    Lock lock(runtime().mutex);
    enqueue(lock, current_stream(device), std::move(task));
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
}

}  // namespace sim
