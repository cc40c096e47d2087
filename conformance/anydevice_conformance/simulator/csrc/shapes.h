// The shapes of an operator's outputs before it has run, from its Meta kernel.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>
#include <optional>
#include <vector>

#include "config.h"

namespace sim {

struct OutputShape {
  std::vector<int64_t> size, stride;
  at::ScalarType dtype = at::kFloat;
  bool none = false;  // an output that is not defined
};

// Runs `op` on the Meta device, or remembers what it gave for such arguments. `meta_arguments`
// makes the call's Meta aliases. Nothing where the Meta kernel raises (the real one then raises
// the real error) or gives a list.
std::optional<std::vector<OutputShape>> infer_shapes(
    const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments,
    const std::function<torch::jit::Stack()>& meta_arguments);

// Runs an operator on arguments that are all on one device that has a kernel.
void run_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace sim
