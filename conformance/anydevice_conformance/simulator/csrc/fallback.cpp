#include "fallback.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>

#include "aliases.h"
#include "generator.h"
#include "op_info.h"
#include "shapes.h"

namespace sim {
namespace {

using torch::jit::Stack;

void copy_below_autograd(const Tensor& to, const Tensor& from) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  to.copy_(from);
}

// Torch's out= gives the tensor that it writes into strides that fit the arguments'. What it gave an
// alias the device's tensor has not: the values go where that has them.
void run_in_place(const c10::OperatorHandle& op, const OpInfo& info, Stack* stack) {
  std::vector<std::pair<Tensor, std::vector<int64_t>>> written;
  for (size_t i = 0; i < info.writes.size(); i++) {
    if (!info.writes[i]) continue;
    for_each_tensor((*stack)[i], [&](const Tensor& t) {
      if (t.numel()) written.emplace_back(t, t.strides().vec());
    });
  }
  run_kernel(op, stack);
  for (const auto& [t, strides] : written) {
    if (t.strides() == at::IntArrayRef(strides)) continue;
    const auto values = t.clone();
    t.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), strides);
    copy_below_autograd(t, values);
  }
}

// Some random operators take no generator and draw from the process's own. Lend it the device's
// state for the call.
void run_with_lent_generator(const c10::OperatorHandle& op, Stack* stack, int device) {
  auto host = at::detail::getDefaultCPUGenerator();
  auto inner = inner_generator(default_generator(device));
  const auto saved = host.get_state();
  host.set_state(inner.get_state());
  try {
    run_kernel(op, stack);
  } catch (...) {
    host.set_state(saved);
    throw;
  }
  inner.set_state(host.get_state());
  host.set_state(saved);
}

// CPU kernels keep statistics of small floats in the small dtype; devices, and Meta, do not.
void shrink_statistics(const c10::OperatorHandle& op, Stack& call) {
  if (op.schema().name() != "aten::native_layer_norm_backward") return;
  const bool weighted = call[5].isTensor() && call[5].toTensor().defined();
  const auto dtype = call[weighted ? 5 : 1].toTensor().scalar_type();
  for (const int statistic : {3, 4}) call[statistic] = call[statistic].toTensor().to(dtype);
}

// One call of one operator.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), info_(op_info(op)), stack_(stack), count_(op.schema().arguments().size()) {}

  void run() {
    find_device();
    refuse_other_devices();
    c10::DeviceGuard guard(device_at(device_));
    const bool may_queue =
        config().mode != Mode::kSync && config().async_kernels && info_.may_queue && !writes_empty_;
    if (may_queue && info_.outputs_are_arguments) return queue_in_place();
    if (may_queue && queue_with_inferred_outputs()) return;
    run_and_wait();
  }

 private:
  at::ArrayRef<c10::IValue> arguments() const {
    return at::ArrayRef<c10::IValue>(*stack_).slice(stack_->size() - count_);
  }

  void find_device() {
    const auto args = arguments();
    for (size_t i = 0; i < count_; i++) {
      for_each_tensor(args[i], [&](const Tensor& t) {
        if (!is_sim(t)) return;
        if (device_ < 0) device_ = t.device().index();
        if (device_ != t.device().index()) refuse(t, i);
        writes_empty_ |= info_.writes[i] && t.numel() == 0;
      });
      if (args[i].isDevice() && args[i].toDevice().type() == kDeviceType) {
        names_device_ = true;
        named_device_ = index_of(args[i].toDevice());
      }
    }
    if (device_ < 0) device_ = named_device_;
    TORCH_CHECK(device_ >= 0, "sim: no sim tensor among the arguments of ", op_.schema().name());
  }

  // As CUDA: a zero-dimensional CPU tensor is a number, and indices may be on the host.
  void refuse_other_devices() const {
    const auto args = arguments();
    for (size_t i = 0; i < count_; i++) {
      for_each_tensor(args[i], [&](const Tensor& t) {
        if (is_sim(t)) return;
        const bool is_number = t.dim() == 0 && !info_.writes[i];
        const bool is_index = info_.takes_cpu_indices && t.device().is_cpu();
        if (!is_number && !is_index) refuse(t, i);
      });
    }
  }

  void refuse(const Tensor& t, size_t argument) const {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two ",
                "devices, ", device_at(device_), " and ", t.device(),
                "! (when checking argument for argument ",
                op_.schema().arguments()[argument].name(), " in method ", op_.schema().name(), ")");
  }

  // The same call on CPU or Meta aliases.
  Stack aliased(bool meta) const {
    Aliaser alias(meta);
    Stack result;
    result.reserve(count_);
    const auto args = arguments();
    for (size_t i = 0; i < count_; i++) result.push_back(aliased(args[i], i, alias, meta));
    return result;
  }

  c10::IValue aliased(const c10::IValue& v, size_t i, Aliaser& alias, bool meta) const {
    const int index = static_cast<int>(i);
    if (index == info_.pin_argument) return {};
    if (v.isGenerator() || index == info_.generator_argument) {
      if (meta) return {};
      const auto& given = v.isGenerator() ? v.toGenerator() : default_generator(device_);
      auto inner = inner_generator(given);
      return inner.defined() ? inner : given;
    }
    if (v.isDevice()) {
      const auto host = Device(meta ? c10::kMeta : c10::kCPU);
      return v.toDevice().type() == kDeviceType ? host : v.toDevice();
    }
    return map_tensors(v, [&](const Tensor& t) {
      if (is_sim(t)) return alias(t);
      if (config().mode == Mode::kSync) return t;
      auto copy = t.clone();  // the host may change it meanwhile
      if (t.unsafeGetTensorImpl()->is_wrapped_number())
        copy.unsafeGetTensorImpl()->set_wrapped_number(true);
      return copy;
    });
  }

  uint64_t queue(Lock& lock, std::function<void()> body) const {
    Task task;
    task.body = std::move(body);
    task.cost_us = config().kernel;
    task.kind = "kernel";
    runtime().host_clock_us += config().launch;
    counter(device_, kKernels)++;
    return enqueue(lock, current_stream(device_), std::move(task));
  }

  void queue(std::function<void()> body) const {
    Lock lock(runtime().mutex);
    queue(lock, std::move(body));
  }

  void finish(Stack outputs) const {
    torch::jit::drop(*stack_, count_);
    for (auto& v : outputs) stack_->push_back(std::move(v));
  }

  // In-place and out=: the outputs are here already.
  void queue_in_place() const {
    Stack outputs;
    for (int argument : info_.returned_argument) outputs.push_back(arguments()[argument]);
    queue([op = op_, call = aliased(false), &info = info_]() mutable {
      run_in_place(op, info, &call);
    });
    finish(std::move(outputs));
  }

  // Outputs whose shapes the Meta kernel tells are allocated now and filled later.
  bool queue_with_inferred_outputs() const {
    if (names_device_ || !op_.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) return false;
    for (bool writes : info_.writes)
      if (writes) return false;
    auto shapes = infer_shapes(op_, arguments(), [&] { return aliased(true); });
    if (!shapes) return false;

    Stack outputs;
    std::vector<Tensor> targets;
    for (const auto& shape : *shapes) {
      if (shape.none) {
        outputs.push_back(Tensor());
        targets.push_back(Tensor());
        continue;
      }
      auto t = new_sim_tensor(shape.size, shape.stride, shape.dtype, device_);
      targets.push_back(cpu_alias(t));
      outputs.push_back(std::move(t));
    }
    queue([op = op_, call = aliased(false), targets = std::move(targets)]() mutable {
      shrink_statistics(op, call);
      run_kernel(op, &call);
      size_t next = 0;
      for (const auto& v : call) {
        // Of gradients that nobody asked for some CPU kernels give more than Meta says, some less.
        const bool absent = v.isNone() || (v.isTensor() && !v.toTensor().defined());
        if (next < targets.size() && (absent || !targets[next].defined())) {
          next++;
          continue;
        }
        for_each_tensor(v, [&](const Tensor& t) {
          const auto& target = targets.at(next++);
          const bool floats = target.is_floating_point() && t.is_floating_point();
          TORCH_CHECK(target.sizes() == t.sizes() &&
                          (floats || target.scalar_type() == t.scalar_type()),
                      "sim: the Meta kernel of ", op.schema().name(), " says ", target.sizes(),
                      " and the CPU kernel ", t.sizes());
          copy_below_autograd(target, t);
        });
      }
    });
    finish(std::move(outputs));
    return true;
  }

  // What it returns is needed at once, or its outputs' shapes depend on the data.
  void run_and_wait() const {
    auto call = std::make_shared<Stack>(aliased(false));
    const auto resized = replace_empty_outputs(*call);
    const Stack given = *call;
    {
      Lock lock(runtime().mutex);
      const auto position = queue(lock, [op = op_, call, device = device_, &info = info_] {
        if (info.draws_from_global) return run_with_lent_generator(op, call.get(), device);
        run_in_place(op, info, call.get());
      });
      wait(lock, position);
    }
    for (const auto& [ours, host] : resized) {
      if (ours.sizes() == host.sizes()) continue;
      ours.resize_(host.sizes());
      ours.copy_(host);
    }
    Stack outputs;
    for (size_t r = 0; r < call->size(); r++) {
      const int argument = info_.returned_argument.at(r);
      outputs.push_back(argument >= 0 ? arguments()[argument] : to_device((*call)[r], given));
    }
    finish(std::move(outputs));
  }

  // The host synchronises only where a device would; the rest is this simulator's own need.
  void wait(Lock& lock, uint64_t position) const {
    auto* stream = current_stream(device_);
    host_sync(lock, stream, position);
    if (!info_.reads_back) counter(device_, kHostSyncs)--;
  }

  // An empty out= may be resized, which an alias cannot be: lend it storage of the host's.
  std::vector<std::pair<Tensor, Tensor>> replace_empty_outputs(Stack& call) const {
    std::vector<std::pair<Tensor, Tensor>> replaced;
    if (!writes_empty_) return replaced;
    for (size_t i = 0; i < count_; i++) {
      if (!info_.writes[i]) continue;
      call[i] = map_tensors(arguments()[i], [&](const Tensor& t) {
        if (!is_sim(t)) return t;
        if (t.numel()) return cpu_alias(t);
        auto host = at::empty(t.sizes(), t.options().device(at::kCPU));
        replaced.emplace_back(t, host);
        return host;
      });
    }
    return replaced;
  }

  // A result on the host, moved to the device; an argument handed back is that argument.
  c10::IValue to_device(const c10::IValue& value, const Stack& given) const {
    return map_tensors(value, [&](const Tensor& t) {
      auto argument = argument_behind(t, given);
      if (argument.defined()) return argument;
      auto ours = new_sim_tensor(t.sizes(), t.strides(), t.scalar_type(), device_);
      queue([target = cpu_alias(ours), t] { copy_below_autograd(target, t); });
      return ours;
    });
  }

  Tensor argument_behind(const Tensor& t, const Stack& given) const {
    for (size_t i = 0; i < count_; i++) {
      std::vector<Tensor> aliases, originals;
      for_each_tensor(given[i], [&](const Tensor& a) { aliases.push_back(a); });
      for_each_tensor(arguments()[i], [&](const Tensor& a) { originals.push_back(a); });
      for (size_t k = 0; k < aliases.size(); k++)
        if (aliases[k].is_same(t)) return originals[k];
    }
    return {};
  }

  const c10::OperatorHandle& op_;
  const OpInfo& info_;
  Stack* stack_;
  const size_t count_;
  int device_ = -1, named_device_ = -1;
  bool names_device_ = false;
  bool writes_empty_ = false;  // perhaps an out= that is to be resized
};

}  // namespace

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  if (op_info(op).metadata_only) {
    op.callBoxedForDispatchKey(c10::DispatchKey::CPU, *stack);
    return;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU),
                              "sim: ", op.schema().name(), " has no CPU kernel to fall back to");
  Call(op, stack).run();
}

}  // namespace sim
