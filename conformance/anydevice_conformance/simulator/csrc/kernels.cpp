// The operators that a device must bring itself, and the table that registers all of them.
#include <ATen/EmptyTensor.h>
#include <ATen/core/op_registration/adaption.h>
#include <ATen/native/Resize.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "aliases.h"
#include "copies.h"
#include "device_allocator.h"
#include "fallback.h"
#include "rnn.h"

namespace sim {
namespace {

using torch::jit::Stack;

int checked_index(std::optional<Device> device) {
  const int index = device ? index_of(*device) : current_device();
  check_device(index);
  return index;
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool> pin,
             std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(device_at(checked_index(device)));
  return at::detail::empty_generic(size, &device_allocator(), c10::DispatchKeySet(kDispatchKey),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return new_sim_tensor(size, stride, c10::dtype_or_default(dtype), checked_index(device));
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size,
                      std::optional<c10::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  const size_t needed =
      at::detail::computeStorageNbytesContiguous(size, self.element_size(), self.storage_offset());
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (needed > storage->nbytes()) resize_storage(storage, needed);
  if (self.sizes() != size) impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  return self;
}

void record_stream(Tensor& self, c10::Stream stream) {
  device_allocator().recordStream(self.storage().data_ptr(), stream);
}

Stack call_fallback(const char* name, std::initializer_list<c10::IValue> arguments) {
  Stack stack(arguments);
  fallback(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""), &stack);
  return stack;
}

// torch sends convolutions of a key that it does not know to these "overrideable" operators; the
// CPU's own choice of algorithm stands behind the plain ones.
Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                   bool transposed, at::IntArrayRef output_padding, int64_t groups) {
  auto result = call_fallback("aten::convolution", {input, weight, bias, stride, padding, dilation,
                                                    transposed, output_padding, groups});
  return result[0].toTensor();
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  std::optional<std::vector<int64_t>> bias_size;
  if (mask[2]) bias_size = {{transposed ? weight.size(1) * groups : weight.size(0)}};
  auto result =
      call_fallback("aten::convolution_backward",
                    {grad, input, weight, bias_size, stride, padding, dilation, transposed,
                     output_padding, groups, c10::List<bool>({mask[0], mask[1], mask[2]})});
  return {result[0].toTensor(), result[1].toTensor(), result[2].toTensor()};
}

// The CPU counts only floating-point values; accelerators also count whole ones, and libraries rely
// on it. Doubles hold 53 bits.
Tensor histc(const Tensor& self, int64_t bins, const c10::Scalar& min, const c10::Scalar& max) {
  const auto dtype = self.scalar_type();
  const bool whole = c10::isIntegralType(dtype, /*includeBool=*/false);
  const auto values = whole ? self.to(at::kDouble) : self;
  auto result = call_fallback("aten::histc", {values, bins, min, max})[0].toTensor();
  return whole ? result.to(dtype) : result;
}

}  // namespace
}  // namespace sim

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(sim::empty));
  m.impl("empty_strided", TORCH_FN(sim::empty_strided));
  m.impl("_copy_from", TORCH_FN(sim::copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(sim::copy_from_and_resize));
  m.impl("resize_", TORCH_FN(sim::resize_));
  m.impl("record_stream", TORCH_FN(sim::record_stream));
  m.impl("convolution_overrideable", TORCH_FN(sim::convolution));
  m.impl("convolution_backward_overrideable", TORCH_FN(sim::convolution_backward));
  m.impl("histc", TORCH_FN(sim::histc));
  m.impl("_thnn_fused_lstm_cell", TORCH_FN(sim::lstm_cell));
  m.impl("_thnn_fused_lstm_cell_backward_impl", TORCH_FN(sim::lstm_cell_backward));
  m.impl("_thnn_fused_gru_cell", TORCH_FN(sim::gru_cell));
  m.impl("_thnn_fused_gru_cell_backward", TORCH_FN(sim::gru_cell_backward));
  // Composite kernels go before a backend's fallback. Named outright, the fallback runs the CPU's
  // own fused kernel, and results are bit-equal to the CPU's. The composite losses go through their
  // out= form, which warns that it resizes its output.
  for (const char* op : {"native_layer_norm", "native_layer_norm_backward", "native_group_norm",
                         "native_group_norm_backward", "mse_loss", "smooth_l1_loss"})
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&sim::fallback>());
}

// Without these a conjugate's copy is _copy_from -> clone -> copy_ -> _copy_from, without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  for (const char* op : {"_copy_from", "_copy_from_and_resize"})
    m.impl(op, torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  for (const char* op : {"_copy_from", "_copy_from_and_resize"})
    m.impl(op, torch::CppFunction::makeFallthrough());
}
