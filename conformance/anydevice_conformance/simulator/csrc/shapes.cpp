#include "shapes.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/ScalarTypeToTypeMeta.h>

#include <mutex>
#include <string>
#include <unordered_map>

namespace sim {
namespace {

using torch::jit::Stack;

// Packs all that an output's shape can depend on into a string.
class KeyWriter {
 public:
  explicit KeyWriter(const void* schema) {
    put(schema);
    put(c10::typeMetaToScalarType(c10::get_default_dtype()));  // of what is made of integers
  }

  // False for an argument of a kind that is not packed.
  bool add(const c10::IValue& v) {
    if (v.isTensor()) return add_tensor(v.toTensor());
    if (v.isNone()) return tag('n');
    if (v.isInt()) return tag('i'), put(v.toInt());
    if (v.isDouble()) return tag('d'), put(v.toDouble());
    if (v.isBool()) return tag(v.toBool() ? 'y' : 'f');
    if (v.isGenerator()) return tag('g');
    if (v.isIntList()) return add_ints(v.toIntVector());
    if (v.isBoolList()) return add_bools(v.toBoolList());
    if (v.isTensorList()) return add_tensors(v.toTensorVector());
    return false;
  }
  std::string take() { return std::move(key_); }

 private:
  bool tag(char c) {
    key_ += c;
    return true;
  }
  template <class T>
  bool put(const T& value) {
    key_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return true;
  }
  bool add_tensor(const Tensor& t) {
    if (!t.defined()) return tag('u');
    tag(is_sim(t) ? 'T' : 'c');
    put(t.scalar_type());
    put(t.dim());
    put(t.unsafeGetTensorImpl()->is_wrapped_number());
    for (auto n : t.sizes()) put(n);
    for (auto n : t.strides()) put(n);
    return true;
  }
  bool add_ints(const std::vector<int64_t>& list) {
    tag('I');
    put(list.size());
    for (auto n : list) put(n);
    return true;
  }
  bool add_bools(const c10::List<bool>& list) {
    tag('B');
    put(list.size());
    for (size_t i = 0; i < list.size(); i++) tag(list.get(i) ? 'y' : 'f');
    return true;
  }
  bool add_tensors(const std::vector<Tensor>& list) {
    tag('L');
    put(list.size());
    for (const auto& t : list) add_tensor(t);
    return true;
  }

  std::string key_;
};

std::optional<std::string> key_of(const c10::OperatorHandle& op,
                                  at::ArrayRef<c10::IValue> arguments) {
  KeyWriter writer(&op.schema());
  for (const auto& v : arguments)
    if (!writer.add(v)) return std::nullopt;
  return writer.take();
}

std::optional<std::vector<OutputShape>> shapes_of(const Stack& outputs) {
  std::vector<OutputShape> shapes;
  for (const auto& v : outputs) {
    OutputShape shape;
    if (v.isTensor() && v.toTensor().defined()) {
      const auto& t = v.toTensor();
      shape = {t.sizes().vec(), t.strides().vec(), t.scalar_type(), false};
    } else if (v.isTensor() || v.isNone()) {
      shape.none = true;
    } else {
      return std::nullopt;
    }
    shapes.push_back(std::move(shape));
  }
  return shapes;
}

class ShapeCache {
 public:
  std::optional<std::vector<OutputShape>> find(const std::string& key) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = known_.find(key);
    if (found == known_.end()) return std::nullopt;
    return found->second;
  }
  void put(const std::string& key, const std::vector<OutputShape>& shapes) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (known_.size() >= kLimit) known_.clear();
    known_[key] = shapes;
  }

 private:
  static constexpr size_t kLimit = 20000;
  std::mutex mutex_;
  std::unordered_map<std::string, std::vector<OutputShape>> known_;
};

}  // namespace

std::optional<std::vector<OutputShape>> infer_shapes(const c10::OperatorHandle& op,
                                                     at::ArrayRef<c10::IValue> arguments,
                                                     const std::function<Stack()>& meta_arguments) {
  static auto* cache = new ShapeCache;
  const auto key = key_of(op, arguments);
  if (key) {
    if (auto known = cache->find(*key)) return known;
  }
  Stack stack = meta_arguments();
  try {
    run_kernel(op, &stack);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  auto shapes = shapes_of(stack);
  if (shapes && key) cache->put(*key, *shapes);
  return shapes;
}

void run_kernel(const c10::OperatorHandle& op, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::NoGradGuard no_grad;
  // A boxed out= kernel with several outputs returns references into the stack that it has just
  // dropped: own the tensors until it is over.
  const Stack keep = *stack;
  op.callBoxed(stack);
}

}  // namespace sim
