// Every operator without a kernel of its own: the CPU's kernel on aliases, queued on the stream.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace sim {

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace sim
